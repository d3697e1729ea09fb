// Metrics on the console, as JSON and as TensorBoard events; the loss monitor.
#include "tessera/base/detail/crc32c.h"
#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tessera/train/detail/console.h"
#include "tessera/train/detail/device.h"
#include "tessera/train/detail/event_file.h"
#include "tessera/train/detail/loss_monitor.h"
#include "tessera/train/detail/metrics_file.h"
#include "tessera/train/trainer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <sstream>

namespace tessera::train {
namespace {

StepMetrics some_step() {
  return {.step = 10,
          .loss = 8.12345,
          .max_loss = 8.5,
          .grad_norm = 1.2345,
          .lr = 0.001,
          .seconds = 0.5,
          .data_seconds = 0.05,
          .tokens_per_second = 6667,
          .tflops = 386.12,
          .mfu = 39.04,
          .peak_tflops = 989,
          .memory_gib = 40.15,
          .samples_read = 640,
          .parameter_bytes = {100, 104},
          .traffic = {{"dp", {2, 4096}}, {"tp", {12, 8192}}}};
}

TEST(StepLine, HasTheFormatOfTorchtitan) {
  EXPECT_EQ(step_line(some_step()),
            "step: 10  loss:  8.12345  grad_norm:  1.2345  memory: 40.15GiB  tps: 6,667  tflops: 386.12  mfu: 39.04%");
  auto cpu = some_step();
  cpu.mfu.reset();
  cpu.tokens_per_second = 1234567;
  EXPECT_EQ(step_line(cpu),
            "step: 10  loss:  8.12345  grad_norm:  1.2345  memory: 40.15GiB  tps: 1,234,567  tflops: 386.12");
  EXPECT_EQ(step_line(some_step()).find('\x1b'), std::string::npos);
  EXPECT_NE(step_line(some_step(), true).find('\x1b'), std::string::npos);
}

TEST(Device, PeakTflopsByName) {
  EXPECT_EQ(known_peak_tflops("NVIDIA H200", "bf16"), 989);
  EXPECT_EQ(known_peak_tflops("NVIDIA H100 PCIe", "fp16"), 756);
  EXPECT_EQ(known_peak_tflops("NVIDIA A100-SXM4-80GB", "fp32"), 19.5);
  EXPECT_EQ(known_peak_tflops("", "bf16"), 0);
  EXPECT_GT(peak_memory_gib(at::kCPU), 0);
}

TEST(Device, ThePeakRateOfACpuIsMeasured) {
  const auto peak = peak_rate(at::kCPU, "bf16");
  EXPECT_GT(peak.tflops, 0);
  EXPECT_CONTAINS(peak.source, "512 x 512 floats measured");
}

TEST(Console, PrintsTheFirstStepAndEveryTenth) {
  std::ostringstream out;
  Console console(out, {.steps = 25, .log_every = 10});
  for (int64_t step = 1; step <= 25; step++) {
    auto metrics = some_step();
    metrics.step = step;
    metrics.tokens_per_second = step == 20 ? 1 : 1000;
    console.on_step(metrics);
  }
  const auto text = out.str();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3);
  EXPECT_EQ(text.find('\r'), std::string::npos);  // no bar
  EXPECT_CONTAINS(text, "step:  1  loss");
  // tps is the mean since the last line.
  EXPECT_CONTAINS(text, "step: 20  loss:  8.12345  grad_norm:  1.2345  memory: 40.15GiB  tps: 900");
}

TEST(Console, HasAProgressBarOnATerminal) {
  std::ostringstream out;
  {
    Console console(out, {.steps = 20, .log_every = 10, .terminal = 0});  // of any width
    auto metrics = some_step();
    console.on_step(metrics);
  }
  EXPECT_CONTAINS(out.str(), "\r\x1b[K[###############...............] 10/20  ");
  EXPECT_TRUE(out.str().ends_with("\r\x1b[K"));  // the bar is erased at the end
}

TEST(MetricsFile, HasOneLineOfJsonPerStep) {
  EXPECT_EQ(json_line(some_step()),
            R"({"step":10,"loss":8.12345,"max_loss":8.5,"grad_norm":1.2345,"lr":0.001,"tps":6667,"tflops":386.12,)"
            R"("mfu":39.04,"peak_tflops":989,"seconds":0.5,"data_seconds":0.05,"memory_gib":40.15,"samples_read":640,)"
            R"("parameter_bytes":[100,104],)"
            R"("comm":{"dp":{"collectives":2,"bytes":4096},"tp":{"collectives":12,"bytes":8192}}})");
  auto skipped = some_step();
  skipped.loss = std::nan("");
  skipped.skipped = "the loss is \"nan\"";
  EXPECT_CONTAINS(json_line(skipped), R"("loss":null,)");
  EXPECT_CONTAINS(json_line(skipped), R"(,"skipped":"the loss is \"nan\""})");
  EXPECT_EQ(json_line(EvalMetrics{.step = 5, .loss = 0.5, .accuracy = 0.25, .samples = 8}),
            R"({"step":5,"eval_loss":0.5,"exact_match":0.25,"eval_samples":8})");
  EXPECT_ERROR(UsageError, MetricsFile("/nowhere/metrics.jsonl"),
               "cannot write '/nowhere/metrics.jsonl': No such file");
}

std::string hex(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned char>(c));
    text += two;
  }
  return text;
}

TEST(EventFile, HasTheBytesOfTensorBoard) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);  // the check value of CRC-32C
  // The first event of tensorboard 2's EventFileWriter, at time 0.
  EXPECT_EQ(hex(detail::version_event(0)), "0900000000000000001a0d627261696e2e4576656e743a32");
  EXPECT_EQ(hex(detail::scalar_event(1.5, 300, {{"a", 0.5f}})),
            "09000000000000f83f10ac022a0a0a080a016115"
            "0000003f");
  const auto record = detail::tf_record("abc");
  EXPECT_EQ(record.size(), 8u + 4 + 3 + 4);
  EXPECT_EQ(hex(record.substr(0, 8)), "0300000000000000");
}

// Splits a file into records and checks every checksum.
std::vector<std::string> read_records(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string bytes(std::istreambuf_iterator<char>(in), {});
  std::vector<std::string> records;
  for (size_t at = 0; at < bytes.size();) {
    uint64_t length = 0;
    std::memcpy(&length, bytes.data() + at, 8);
    const auto data = bytes.substr(at + 12, length);
    EXPECT_EQ(detail::tf_record(data), bytes.substr(at, length + 16));
    records.push_back(data);
    at += length + 16;
  }
  return records;
}

TEST(EventFile, HasTheTagsOfTorchtitan) {
  const auto folder = std::filesystem::temp_directory_path() / c10::str("tessera_events_", getpid());
  std::string path;
  {
    EventFile events(folder.string(), 10);
    path = events.path();
    events.on_step(some_step());
    auto between = some_step();
    between.step = 11;
    events.on_step(between);
    events.on_eval({.step = 11, .loss = 1, .accuracy = 1, .samples = 1});
  }
  const auto records = read_records(path);
  std::filesystem::remove_all(folder);
  ASSERT_EQ(records.size(), 3u);  // the version, step 10, the evaluation
  EXPECT_CONTAINS(records[0], "brain.Event:2");
  for (const std::string tag : {"loss_metrics/global_avg_loss", "loss_metrics/global_max_loss", "grad_norm",
                                "throughput(tps)", "tflops", "mfu(%)", "time_metrics/end_to_end(s)",
                                "time_metrics/data_loading(s)", "memory/max_active(GiB)", "comm/dp/bytes"})
    EXPECT_CONTAINS(records[1], tag);
  EXPECT_CONTAINS(records[2], "validation_metrics/loss");
}

TEST(Histogram, CountsEachElementOnce) {
  const auto values = torch::cat({torch::arange(101, torch::kFloat) / 100, torch::tensor({NAN, INFINITY})});
  const auto plain = histograms_of(std::vector<at::Tensor>{values})[0];
  EXPECT_EQ(plain.num, 101);
  EXPECT_EQ(plain.min, 0);
  EXPECT_EQ(plain.max, 1);
  EXPECT_NEAR(plain.sum, 50.5, 1e-4);
  EXPECT_EQ(plain.limits.size(), 64u);
  EXPECT_EQ(plain.limits.back(), 1);
  EXPECT_EQ(std::accumulate(plain.counts.begin(), plain.counts.end(), 0.0), 101);
  for (const int64_t n : {1, 2, 3})
    testing::run_ranks(n, [&](testing::Rank& me) {
      const auto mesh = me.mesh({n}, {"dp"});
      for (const Placement& placement : {Placement(Shard(0)), Placement(Replicate())}) {
        const auto found = histograms_of(
            std::vector<at::Tensor>{distribute_tensor(values, mesh, {placement}, {.src_data_rank = {}})})[0];
        EXPECT_EQ(found.counts, plain.counts) << n << placement;
        EXPECT_NEAR(found.sum_squares, plain.sum_squares, 1e-9);
      }
      // A partial tensor: each rank has an n-th of the values.
      const auto partial = DTensor::from_local(values / n, mesh, {Partial()});
      EXPECT_EQ(histograms_of(std::vector<at::Tensor>{partial})[0].num, 101);
    });
  const auto constant = histograms_of(std::vector<at::Tensor>{torch::ones({4})})[0];
  EXPECT_EQ(constant, (Histogram{1, 1, 4, 4, 4, {1}, {4}}));
  EXPECT_EQ(histograms_of(std::vector<at::Tensor>{torch::full({2}, NAN)})[0], Histogram());
}

TEST(Histogram, HasTheBytesOfTensorBoard) {
  // tag "a", a value 2 twice: min, max 2, num 2, sum 4, squares 8, one bucket.
  EXPECT_EQ(hex(detail::histogram_event(1.5, 3, {{"a", Histogram{2, 2, 2, 4, 8, {2}, {2}}}})),
            "09000000000000f83f1003"
            "2a48"  // summary of 72 bytes
            "0a46"  // value
            "0a0161"
            "2a41"  // histo of 65 bytes
            "090000000000000040"
            "110000000000000040"
            "190000000000000040"
            "210000000000001040"
            "290000000000002040"
            "32080000000000000040"
            "3a080000000000000040");
}

TEST(SummaryWriter, WritesScalarsAndHistogramsOfAModule) {
  const auto folder = std::filesystem::temp_directory_path() / c10::str("tessera_writer_", getpid());
  testing::run_ranks(2, [&](testing::Rank&) {
    SummaryWriter writer(folder.string());
    torch::nn::Linear net(3, 2);
    net(torch::ones({1, 3})).sum().backward();
    writer.add_scalar("loss", 0.5, 1);
    writer.add_histograms(*net, 1);
    writer.add_histogram("inputs", torch::ones({3}), 1);
  });
  std::vector<std::string> files;
  for (const auto& file : std::filesystem::directory_iterator(folder)) files.push_back(file.path().string());
  ASSERT_EQ(files.size(), 1u) << "rank 0 alone writes";
  const auto records = read_records(files[0]);
  std::filesystem::remove_all(folder);
  ASSERT_EQ(records.size(), 4u);
  EXPECT_CONTAINS(records[1], "loss");
  for (const char* tag : {"weights/weight", "gradients/weight", "weights/bias", "gradients/bias"})
    EXPECT_CONTAINS(records[2], tag);
  EXPECT_CONTAINS(records[3], "inputs");
}

using Action = LossMonitor::Action;

TEST(LossMonitor, StopsOrSkipsNonFiniteSteps) {
  const double nan = std::nan(""), inf = INFINITY;
  EXPECT_EQ(LossMonitor({}).check(1, 1), LossMonitor::Verdict());
  EXPECT_EQ(LossMonitor({}).check(nan, 1), (LossMonitor::Verdict{Action::Stop, "the loss is nan"}));
  EXPECT_EQ(LossMonitor({.on_nan = "skip"}).check(1, inf),
            (LossMonitor::Verdict{Action::Skip, "the gradient norm is inf"}));
  EXPECT_EQ(LossMonitor({.on_nan = "ignore"}).check(nan, 1).action, Action::Continue);
  EXPECT_EQ(LossMonitor({}).check(1, inf, /*norm_may_overflow=*/true), LossMonitor::Verdict());
}

TEST(LossMonitor, DetectsASpike) {
  LossMonitor loss_monitor({.on_spike = "skip", .spike = 5});
  EXPECT_EQ(loss_monitor.check(100, 1).action, Action::Continue);  // fewer than kMinLosses
  for (int i = 0; i < 200; i++) EXPECT_EQ(loss_monitor.check(2 + 0.1 * (i % 2), 1).action, Action::Continue) << i;
  const auto verdict = loss_monitor.check(4, 1);
  EXPECT_EQ(verdict.action, Action::Skip);
  EXPECT_CONTAINS(verdict.reason, "the loss is 4, ");
  EXPECT_CONTAINS(verdict.reason, "standard deviations above the mean of the last 128, 2.05");
  EXPECT_EQ(loss_monitor.check(1, 1).action, Action::Continue);  // a low loss is not a spike
  EXPECT_EQ(LossMonitor({}).check(1e30, 1).action, Action::Continue);
}

}  // namespace
}  // namespace tessera::train
