// `tessera train` as a person meets it: what it prints and writes, and what it says of bad input.
#include "tessera/testing/expect_error.h"
#include "tests/launch/shell.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

const std::string kFolder = "cd $(mktemp -d); trap 'rm -rf \"$PWD\"' EXIT; export OMP_NUM_THREADS=1;";
const std::string kTiny = " --layers 1 --heads 2 --dim 16 --batch 8 --warmup 1 --eval-samples 8";

Shell train(const std::string& arguments, const std::string& before = "", const std::string& after = "") {
  return shell(kFolder + before + "\"$TESSERA\" train" + kTiny + " " + arguments + "; code=$?; " + after +
               " echo code $code");
}

TEST(TesseraTrain, FourRanksFromOneCommand) {
  const auto ran = train("--mesh dp=2,tp=2 --steps 3 --log-every 1 --output out", "",
                         "ls out out/tb; cat out/metrics.jsonl; cat out/config.toml;");
  EXPECT_SAYS(ran.text, "code 0\n");
  EXPECT_SAYS(ran.text, "training gpt-tiny, 0.01M parameters, on arithmetic: 3 steps of 8 x 8 tokens, mesh dp=2,tp=2");
  for (const std::string step : {"\nstep:  1  loss:  5.", "\nstep:  2  loss:  5.", "\nstep:  3  loss:  5."})
    EXPECT_EQ(count(ran.text, step), 1) << ran.text;  // one rank speaks, without a prefix
  EXPECT_SAYS(ran.text, "eval at step:  3  loss:");
  EXPECT_SAYS(ran.text, "outputs: out/ (config.toml, metrics.jsonl, tb/)");
  EXPECT_SAYS(ran.text, "events.out.tfevents.");
  EXPECT_SAYS(ran.text, "{\"step\":3,\"loss\":");
  EXPECT_SAYS(ran.text, "\"samples_read\":24,\"parameter_bytes\":[");
  EXPECT_SAYS(ran.text, "\"comm\":{\"dp\":{\"collectives\":");
  EXPECT_SAYS(ran.text, "mesh = \"dp=2,tp=2\"");
  EXPECT_EQ(ran.text.find('\x1b'), std::string::npos) << "no colours and no bar where no terminal is";
}

TEST(TesseraTrain, ItsConfigCanBeReadBackAndFlagsGoFirst) {
  const auto ran =
      train("--lr 3e-4 --print-config > a.toml; \"$TESSERA\" train --config a.toml --steps 7 --print-config > b.toml",
            "", "diff a.toml b.toml;");
  EXPECT_SAYS(ran.text, "< steps = 1000");
  EXPECT_SAYS(ran.text, "> steps = 7");
  EXPECT_EQ(count(ran.text, "<"), 1) << ran.text;
}

TEST(TesseraTrain, OfAFileOnOneRank) {
  const auto ran = train("--data text --seq-len 8 --steps 2 --sample-tokens 3 --output out",
                         "for i in 1 2 3 4 5 6 7 8 9; do echo some text of bytes >> text; done; ");
  EXPECT_SAYS(ran.text, "code 0\n");
  EXPECT_SAYS(ran.text, "on text: 2 steps of 8 x 8 tokens, mesh dp=1");
}

TEST(TesseraTrain, GoesOnFromACheckpointOnAnotherMesh) {
  const auto again = "\"$TESSERA\" train" + kTiny + " --mesh tp=2 --steps 6 --output out --resume auto --log-every 1;";
  const auto ran = train("--mesh dp=2 --steps 4 --checkpoint-every 2 --output out", "",
                         again + "ls out/checkpoints; grep -c grad_norm out/metrics.jsonl;");
  EXPECT_SAYS(ran.text, "\ncheckpoint: out/checkpoints/step-2\n");
  EXPECT_SAYS(ran.text, "\ncheckpoint: out/checkpoints/step-4\n");
  EXPECT_SAYS(ran.text, "outputs: out/ (config.toml, metrics.jsonl, tb/, checkpoints/)");
  EXPECT_SAYS(ran.text, "\ngoing on from out/checkpoints/step-4, after step 4\n");
  EXPECT_EQ(count(ran.text, "\nstep:  5  loss:"), 1) << ran.text;
  EXPECT_SAYS(ran.text, "\nstep-2\nstep-4\n6\n");  // folders; then lines of metrics: four and two
  EXPECT_SAYS(ran.text, "code 0\n");
}

TEST(TesseraTrain, WhatWasNotLearnedIsAFailure) {
  const auto ran = train("--steps 2 --accuracy 0.9 -n 2 --output out");
  EXPECT_SAYS(ran.text,
              "tessera train: it did not learn: 0.0% of the held-out answers are right, and 90.0% were asked for");
  EXPECT_SAYS(ran.text, "code 1\n");
}

struct Bad {
  const char* arguments;
  const char* says;
  const char* before = "";
};

// One line each, exit code 2, before anything starts.
TEST(TesseraTrain, BadInputIsOneLine) {
  const Bad cases[] = {
      {"--model gpt-tiy", "tessera train: there is no model 'gpt-tiy'; did you mean 'gpt-tiny'"},
      {"--mesh dp=2,tp=2 -n 3", "tessera train: mesh 'dp=2,tp=2' has 4 ranks, and -n asks for 3"},
      {"--mesh dp=2,pp=2", "there is no axis 'pp' in training; there are dp (copies), fsdp"},
      {"--mesh tp=4", "tessera train: gpt-tiny has 2 heads, which tp=4 does not divide; take tp of 1, 2"},
      {"--mesh dp=3", "a batch of 8 samples does not divide by 3 data-parallel ranks times 1 parts"},
      {"--data nowhere.txt", "tessera train: cannot read the data 'nowhere.txt': No such file or directory"},
      {"--data empty", "tessera train: the data 'empty' are empty", "touch empty;"},
      {"--data x.bin", "do not start with a header of llm.c; say what they are with --data-format",
       "echo abcd > x.bin;"},
      {"--output /dev/null/x", "tessera train: cannot make the output folder '/dev/null/x': Not a directory"},
      {"--resume nowhere", "tessera train: there is no checkpoint 'nowhere'"},
      {"--resume auto", "tessera train: --resume auto looks for checkpoints, and each training has an output folder"},
      {"--steps ten", "tessera train: training.steps is 'ten', which is no whole number"},
      {"--precision fp8", "tessera train: training.precision is 'fp8'; it is one of: fp32, bf16, fp16"},
      {"--config x.toml",
       "tessera train: x.toml, line 2: there is no option 'training.step'; did you mean 'training.steps'",
       "printf '[training]\\nstep = 3\\n' > x.toml;"},
      {"--config x.toml", "tessera train: cannot read x.toml, line 1: ", "echo '[training' > x.toml;"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.arguments);
    const auto ran = train(c.arguments, c.before);
    EXPECT_SAYS(ran.text, c.says);
    EXPECT_EQ(count(ran.text, "\n"), 2) << ran.text;  // the line, and ours
    EXPECT_SAYS(ran.text, "code 2\n");
  }
}

// Found when it is read, by the rank that reads it.
TEST(TesseraTrain, ATokenBeyondTheVocabularyIsOneLine) {
  const auto ran =
      train("--data x.bin --data-format uint16 --seq-len 8 -n 2 --steps 50 --output out",
            "head -c 4000 /dev/zero > x.bin; printf '\\377\\377' >> x.bin; head -c 4000 /dev/zero >> x.bin;");
  EXPECT_EQ(count(ran.text, "token 65535 at position 2000 of 'x.bin' is beyond the model's vocabulary of 256"), 1)
      << ran.text;
  EXPECT_SAYS(ran.text, "code 2\n");
}

TEST(TesseraTrain, CtrlCIsOneLineAndLeavesNothing) {
  for (const std::string ranks : {"1", "2"}) {
    SCOPED_TRACE(ranks);
    const auto ran =
        shell(kFolder + "env --default-signal=INT \"$TESSERA\" train" + kTiny +
              " --steps 1000000 --output $PWD/out -n " + ranks +
              " > log 2>&1 & until grep -q 'step: 10' log; do sleep 0.05; done; kill -INT $!; wait $!; echo code $?; "
              "grep -c tessera log; tail -n 1 log; pgrep -f \"output.*$PWD/out\" || echo none left");
    EXPECT_SAYS(ran.text, "code 130\n1\n");
    EXPECT_SAYS(ran.text, ranks == "1" ? "tessera train: interrupted; what was written so far is in "
                                       : "tessera train: stopped by signal 2 (Interrupt)");
    EXPECT_SAYS(ran.text, "none left");
  }
}

}  // namespace
}  // namespace tessera::testing
