// `tessera train` as a process: output, files, exit codes, and messages for wrong input.
#include "tessera/testing/expect_error.h"
#include "tests/launch/shell.h"

#include <gtest/gtest.h>

#include <string_view>

namespace tessera::testing {
namespace {

const std::string kFolder = "cd $(mktemp -d); trap 'rm -rf \"$PWD\"' EXIT; export OMP_NUM_THREADS=1;";
const std::string kTiny = " --layers 1 --heads 2 --dim 16 --batch 8 --warmup 1 --eval-samples 8";

Shell train(const std::string& arguments, const std::string& before = "", const std::string& after = "") {
  return shell(kFolder + before + "\"$TESSERA\" train" + kTiny + " " + arguments + "; code=$?; " + after +
               " echo code $code");
}

// Some tests read a config file, which needs toml++.
bool has_toml() {
  static const bool found = train("--config /dev/null --print-config").text.find("without toml++") == std::string::npos;
  return found;
}
constexpr const char* kNoToml = "this program was built without toml++ (libtomlplusplus-dev)";

TEST(TesseraTrain, FourRanksFromOneCommand) {
  const auto ran = train("--mesh dp=2,tp=2 --steps 3 --log-every 1 --output out", "",
                         "ls out out/tb; cat out/metrics.jsonl; cat out/config.toml;");
  EXPECT_CONTAINS(ran.text, "code 0\n");
  EXPECT_CONTAINS(ran.text,
                  "training gpt-tiny, 0.01M parameters, on arithmetic: 3 steps of 8 x 8 tokens, mesh dp=2,tp=2");
  for (const std::string step : {"\nstep:  1  loss:  5.", "\nstep:  2  loss:  5.", "\nstep:  3  loss:  5."})
    EXPECT_EQ(count(ran.text, step), 1) << ran.text;  // only rank 0 prints, without a prefix
  EXPECT_CONTAINS(ran.text, "eval at step:  3  loss:");
  EXPECT_CONTAINS(ran.text, "outputs: out/ (report.html, config.toml, metrics.jsonl, tb/)");
  EXPECT_CONTAINS(ran.text, "events.out.tfevents.");
  EXPECT_CONTAINS(ran.text, "{\"step\":3,\"loss\":");
  EXPECT_CONTAINS(ran.text, "\"samples_read\":24,\"parameter_bytes\":[");
  EXPECT_CONTAINS(ran.text, "\"comm\":{\"dp\":{\"collectives\":");
  EXPECT_CONTAINS(ran.text, "mesh = \"dp=2,tp=2\"");
  EXPECT_EQ(ran.text.find('\x1b'), std::string::npos) << "no colours and no progress bar without a terminal";
}

TEST(TesseraTrain, ThePrintedConfigReadsBackAndFlagsOverrideIt) {
  if (!has_toml()) GTEST_SKIP() << kNoToml;
  const auto ran =
      train("--lr 3e-4 --print-config > a.toml; \"$TESSERA\" train --config a.toml --steps 7 --print-config > b.toml",
            "", "diff a.toml b.toml;");
  EXPECT_CONTAINS(ran.text, "< steps = 1000");
  EXPECT_CONTAINS(ran.text, "> steps = 7");
  EXPECT_EQ(count(ran.text, "<"), 1) << ran.text;
}

TEST(TesseraTrain, TrainsOnATextFileWithOneRank) {
  const auto ran = train("--data text --seq-len 8 --steps 2 --sample-tokens 3 --output out",
                         "for i in 1 2 3 4 5 6 7 8 9; do echo some text of bytes >> text; done; ");
  EXPECT_CONTAINS(ran.text, "code 0\n");
  EXPECT_CONTAINS(ran.text, "on text: 2 steps of 8 x 8 tokens, mesh dp=1");
}

TEST(TesseraTrain, ResumesFromACheckpointOnAnotherMesh) {
  const auto again = "\"$TESSERA\" train" + kTiny + " --mesh tp=2 --steps 6 --output out --resume auto --log-every 1;";
  const auto ran = train("--mesh dp=2 --steps 4 --checkpoint-every 2 --output out", "",
                         again + "ls out/checkpoints; grep -c grad_norm out/metrics.jsonl;");
  EXPECT_CONTAINS(ran.text, "\ncheckpoint: out/checkpoints/step-2\n");
  EXPECT_CONTAINS(ran.text, "\ncheckpoint: out/checkpoints/step-4\n");
  EXPECT_CONTAINS(ran.text, "outputs: out/ (report.html, config.toml, metrics.jsonl, tb/, checkpoints/)");
  EXPECT_CONTAINS(ran.text, "\nresumed from out/checkpoints/step-4 at step 4\n");
  EXPECT_EQ(count(ran.text, "\nstep:  5  loss:"), 1) << ran.text;
  EXPECT_CONTAINS(ran.text, "\nstep-2\nstep-4\n6\n");  // the folders, then the number of metric lines: 4 + 2
  EXPECT_CONTAINS(ran.text, "code 0\n");
}

TEST(TesseraTrain, AMissedAccuracyIsAFailure) {
  const auto ran = train("--steps 2 --accuracy 0.9 -n 2 --output out");
  EXPECT_CONTAINS(ran.text, "tessera train: the validation accuracy is 0.0%, below the required 90.0% (--accuracy)");
  EXPECT_CONTAINS(ran.text, "code 1\n");
}

struct BadInput {
  const char* arguments;
  const char* message;
  const char* setup = "";
};

// Each prints one line and exits with 2 before any rank starts.
TEST(TesseraTrain, WrongInputIsOneLine) {
  const BadInput cases[] = {
      {"--model gpt-tiy", "gpt-tiy"},
      {"--mesh dp=2,tp=2 -n 3", "tessera train: mesh 'dp=2,tp=2' needs 4 ranks, but -n is 3"},
      {"--mesh dp=2,zz=2", "unknown axis 'zz'; allowed: "},
      {"--mesh tp=4", "tessera train: gpt-tiny has 2 heads, which are not divisible by tp=4; use tp of 1, 2"},
      {"--mesh dp=3", "a batch of 8 samples is not divisible by 3 data-parallel ranks x 1 accumulation steps"},
      {"--data nowhere.txt", "No such file or directory"},
      {"--data empty", "'empty'", "touch empty;"},
      {"--data x.bin", "--data-format", "echo abcd > x.bin;"},
      {"--output /dev/null/x", "tessera train: cannot create the output folder '/dev/null/x': Not a directory"},
      {"--resume nowhere", "'nowhere'"},
      {"--resume auto", "tessera train: --resume auto needs --output or --checkpoint-folder"},
      {"--steps ten", "tessera train: training.steps is 'ten'; write an integer"},
      {"--precision fp8", "tessera train: training.precision is 'fp8'; allowed: fp32, bf16, fp16"},
      {"--config x.toml", "tessera train: x.toml, line 2: unknown option 'training.step'; ",
       "printf '[training]\\nstep = 3\\n' > x.toml;"},
      {"--config x.toml", "tessera train: cannot read x.toml, line 1: ", "echo '[training' > x.toml;"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.arguments);
    if (!has_toml() && std::string_view(c.arguments).starts_with("--config")) continue;
    const auto ran = train(c.arguments, c.setup);
    EXPECT_CONTAINS(ran.text, c.message);
    EXPECT_EQ(count(ran.text, "\n"), 2) << ran.text;  // the message and `code`
    EXPECT_CONTAINS(ran.text, "code 2\n");
  }
  if (!has_toml()) GTEST_SKIP() << kNoToml << ": the config files were left out";
}

// A rank finds this error when it reads the data.
TEST(TesseraTrain, ATokenBeyondTheVocabularyIsOneLine) {
  const auto ran =
      train("--data x.bin --data-format uint16 --seq-len 8 -n 2 --steps 50 --output out",
            "head -c 4000 /dev/zero > x.bin; printf '\\377\\377' >> x.bin; head -c 4000 /dev/zero >> x.bin;");
  EXPECT_EQ(count(ran.text, "token 65535 at position 2000 of 'x.bin'"), 1) << ran.text;
  EXPECT_CONTAINS(ran.text, "code 2\n");
  const auto small = train("--model.vocab_size 16");
  EXPECT_CONTAINS(small.text, "token 61, beyond the model's vocabulary of 16; set model.vocab_size to 62 or more");
  EXPECT_CONTAINS(small.text, "code 2\n");
}

TEST(TesseraTrain, CtrlCPrintsOneLineAndLeavesNoProcess) {
  for (const std::string ranks : {"1", "2"}) {
    SCOPED_TRACE(ranks);
    const auto ran =
        shell(kFolder + "env --default-signal=INT \"$TESSERA\" train" + kTiny +
              " --steps 1000000 --output $PWD/out -n " + ranks +
              " > log 2>&1 & until grep -q 'step: 10' log; do sleep 0.05; done; kill -INT $!; wait $!; echo code $?; "
              "grep -c tessera log; tail -n 1 log; pgrep -f \"output.*$PWD/out\" || echo none left");
    EXPECT_CONTAINS(ran.text, "code 130\n1\n");
    EXPECT_CONTAINS(ran.text, ranks == "1" ? "tessera train: interrupted; outputs so far are in "
                                           : "tessera train: stopped by signal 2 (Interrupt)");
    EXPECT_CONTAINS(ran.text, "none left");
  }
}

}  // namespace
}  // namespace tessera::testing
