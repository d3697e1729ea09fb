// `tessera ckpt` as a process: show, verify, diff and convert checkpoints of a training.
#include "tessera/testing/expect_error.h"
#include "tests/launch/shell.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

// Two checkpoints of a tiny Llama on two ranks, in out/checkpoints.
const std::string kTrained =
    "cd $(mktemp -d); trap 'rm -rf \"$PWD\"' EXIT; export OMP_NUM_THREADS=1;"
    "\"$TESSERA\" train --model llama-tiny --layers 1 --heads 2 --dim 16 --batch 8 --warmup 1 --eval-samples 8"
    " --sample-tokens 0 --mesh fsdp=2 --steps 2 --checkpoint-every 1 --checkpoint-async --output out > log || cat log;"
    "ckpt() { \"$TESSERA\" ckpt \"$@\"; echo code $?; };";

TEST(Ckpt, ShowsAndVerifies) {
  const auto ran =
      shell(kTrained +
            "ckpt show out/checkpoints; ckpt show out/checkpoints/step-1 --json | head -c 60; echo;"
            "ckpt verify out/checkpoints;"
            "f=$(ls out/checkpoints/step-2/shard-00001*); size=$(stat -c %s $f);"
            "printf '\\377' | dd of=$f bs=1 seek=$((size - 9)) conv=notrunc 2>/dev/null; ckpt verify out/checkpoints;"
            "ckpt verify nowhere; ckpt diff out; ckpt shoe out");
  EXPECT_CONTAINS(ran.text, "out/checkpoints/step-2: ");
  EXPECT_CONTAINS(ran.text, "  step = 2\n");
  EXPECT_CONTAINS(ran.text, "model.layers.0.attention.wq.weight");
  EXPECT_CONTAINS(ran.text, "2 shards");
  EXPECT_CONTAINS(ran.text, "{\"path\":\"out/checkpoints/step-1\",\"values\":{");
  EXPECT_CONTAINS(ran.text, "out/checkpoints/step-2: ok, ");
  EXPECT_CONTAINS(ran.text, "are damaged: their checksum is ");
  EXPECT_CONTAINS(ran.text, "out/checkpoints/step-2: 1 damaged shard, ");
  EXPECT_CONTAINS(ran.text, "tessera: ckpt verify: the checkpoint is damaged\ncode 1\n");
  EXPECT_CONTAINS(ran.text, "the checkpoint 'nowhere' does not exist\ncode 2\n");
  EXPECT_CONTAINS(ran.text, "ckpt diff needs two paths, and got 1\ncode 2\n");
}

TEST(Ckpt, ComparesAndConverts) {
  const auto ran =
      shell(kTrained +
            "ckpt diff out/checkpoints/step-1 out/checkpoints/step-2; ckpt diff out/checkpoints/step-2 out/checkpoints;"
            "ckpt diff out/checkpoints/step-1 out/checkpoints/step-2 --tolerance 1e9 | tail -n 4;"
            "ckpt convert out/checkpoints d --to distcp; echo distcp; ckpt diff out/checkpoints d;"
            "ckpt convert out/checkpoints hf --prefix model. --to-hf llama --heads 2; ckpt show hf;"
            "ckpt convert hf back --from-hf llama --heads 2 --to tessera;"
            "ckpt convert out/checkpoints plain --prefix model.; echo back; ckpt diff back plain;"
            "ckpt convert hf back --from-hf llama --heads 2");
  EXPECT_CONTAINS(ran.text, "value step: 1 and 2\n");
  EXPECT_CONTAINS(ran.text, " elements differ, by at most ");
  EXPECT_CONTAINS(ran.text, "ckpt diff: the checkpoints differ\ncode 1\n");
  EXPECT_CONTAINS(ran.text, "equal: out/checkpoints/step-2 and out/checkpoints/step-2\ncode 0\n");
  EXPECT_CONTAINS(ran.text, "distcp\nequal: out/checkpoints/step-2 and d\ncode 0\n");
  EXPECT_CONTAINS(ran.text, "model.layers.0.self_attn.q_proj.weight");
  EXPECT_CONTAINS(ran.text, "back\nequal: back and plain\ncode 0\n");
  EXPECT_CONTAINS(ran.text, "'back' already exists; name a new folder\ncode 2\n");
}

TEST(Ckpt, AResumedRunSaysWhatChanges) {
  const auto ran =
      shell(kTrained +
            "\"$TESSERA\" train --model llama-tiny --layers 1 --heads 2 --dim 16 --batch 4 --warmup 1 --eval-samples 8"
            " --sample-tokens 0 --mesh fsdp=2 --steps 3 --output out --resume auto --checkpoint-every 1");
  EXPECT_CONTAINS(ran.text, "resumed from out/checkpoints/step-2 at step 2\n");
  EXPECT_CONTAINS(ran.text, "changed: training.batch is 4, and was 8; the data continue after sample 16");
  EXPECT_CONTAINS(ran.text, "changed: training.steps is 3, and was 2; the schedule ends at another step\n");
}

}  // namespace
}  // namespace tessera::testing
