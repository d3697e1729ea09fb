// MNIST in its file format (IDX). Where a folder has no such files, digits are drawn and written in this format.
#pragma once
#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

// The files train-images-idx3-ubyte and train-labels-idx1-ubyte of a folder.
class Digits : public torch::data::datasets::Dataset<Digits> {
 public:
  explicit Digits(const std::string& folder) {
    const auto images = folder + "/train-images-idx3-ubyte", labels = folder + "/train-labels-idx1-ubyte";
    if (!std::filesystem::exists(labels)) draw(images, labels, 1000);
    images_ = read(images, 3).to(torch::kFloat).unsqueeze(1) / 255;
    labels_ = read(labels, 1).to(torch::kLong);
  }
  torch::data::Example<> get(size_t index) override {
    return {images_[static_cast<int64_t>(index)], labels_[static_cast<int64_t>(index)]};
  }
  torch::optional<size_t> size() const override { return images_.size(0); }

 private:
  // An IDX file: 0, 0, 8 (bytes), number of dims, the sizes as big-endian int32, the bytes.
  static void write(const std::string& path, const torch::Tensor& t) {
    const auto unfinished = path + "." + std::to_string(getpid());  // several processes may write the same file
    std::ofstream out(unfinished, std::ios::binary);
    out.put(0).put(0).put(8).put(static_cast<char>(t.dim()));
    for (const int64_t size : t.sizes())
      for (int shift = 24; shift >= 0; shift -= 8) out.put(static_cast<char>(size >> shift));
    out.write(static_cast<const char*>(t.data_ptr()), t.numel());
    out.close();
    std::filesystem::rename(unfinished, path);
  }
  static torch::Tensor read(const std::string& path, int64_t dims) {
    std::ifstream in(path, std::ios::binary);
    std::vector<unsigned char> head(4 + 4 * static_cast<size_t>(dims));
    in.read(reinterpret_cast<char*>(head.data()), static_cast<std::streamsize>(head.size()));
    TORCH_CHECK(in && head[2] == 8 && head[3] == dims, path, " is not an IDX file of bytes with ", dims, " dims");
    std::vector<int64_t> sizes;
    for (size_t d = 4; d < head.size(); d += 4)
      sizes.push_back(head[d] << 24 | head[d + 1] << 16 | head[d + 2] << 8 | head[d + 3]);
    auto bytes = torch::empty(sizes, torch::kByte);
    in.read(static_cast<char*>(bytes.data_ptr()), bytes.numel());
    TORCH_CHECK(in, path, " is too short");
    return bytes;
  }
  // A digit is a bar whose angle and position depend on the label, with noise.
  static void draw(const std::string& images, const std::string& labels, int64_t count) {
    auto label = torch::arange(count).remainder(10);
    auto y = torch::arange(28).view({1, 28, 1}) - 13.5, x = torch::arange(28).view({1, 1, 28}) - 13.5;
    auto angle = label.view({-1, 1, 1}) * 0.314, shift = torch::arange(count).view({-1, 1, 1}).remainder(7) - 3.0;
    auto distance = (x * torch::cos(angle) + y * torch::sin(angle) - shift).abs();
    auto noise = torch::sin(torch::arange(count * 784).view({count, 28, 28}) * 12.9898).abs() * 40;
    write(images, (torch::exp(-distance) * 200 + noise).to(torch::kByte).contiguous());
    write(labels, label.to(torch::kByte).contiguous());
  }

  torch::Tensor images_, labels_;
};
