#pragma once
#include "tessera/checkpoint/save.h"

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tessera::dcp {

// The steps of one save on one rank. save() makes them one after the other, async_save() makes write() on a thread.
//
//   plan     all ranks: who writes what; rank 0 creates the folder
//   stage    only async_save: copies the tensors of this rank's files, before it returns or at the start of write()
//   write    all ranks: write files, report checksums; rank 0 writes the manifest and renames the folder
class Saver {
 public:
  Saver(std::string path, SaveOptions options);

  void plan(const StateDict& dict, const Values& values, const World& world);
  // Copies into the memory of an earlier save where name, sizes and dtype are the same. Its memory is then in use here.
  void stage(std::map<std::string, at::Tensor> memory);
  std::map<std::string, at::Tensor> take_memory() && { return std::move(memory_); }
  // Exchanges texts over the store of `group`, so each thread needs a group with a store of its own.
  // `before`: called first; if it throws on one rank, all ranks throw.
  void write(const comm::Group& group, const std::function<void()>& before = {});

  const std::string& path() const { return path_; }

 private:
  struct ShardFile {
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    std::vector<Sizes> offsets;  // of the box of each tensor
  };
  using Texts = std::vector<std::string>;

  std::string create_folder(const Texts& local_plans);   // on rank 0; returns the global plan
  void make_partial_folder(const Manifest& plan) const;  // of what an earlier save has left
  std::string write_files();                             // returns checksums
  std::string finish(const Texts& checksums);            // on rank 0
  void report(std::string_view stage) const;

  SaveOptions options_;
  std::string path_, partial_, what_;
  Manifest plan_;
  std::map<std::string, ShardFile> files_;    // of this rank, by name
  std::map<std::string, at::Tensor> memory_;  // of staged tensors, by file and name
  std::shared_ptr<void> folder_in_use_;       // on rank 0
};

}  // namespace tessera::dcp
