#include "tessera/tensor_parallel/detail/style.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using testing::error_message;

TEST(Style, DefaultsAreThoseOfPyTorch) {
  EXPECT_EQ(ColwiseParallel(), (ColwiseParallel{.input_layouts = Replicate(),
                                                .output_layouts = Shard(-1),
                                                .use_local_output = true,
                                                .block = 1,
                                                .sections = 1}));
  EXPECT_EQ(RowwiseParallel(),
            (RowwiseParallel{
                .input_layouts = Shard(-1), .output_layouts = Replicate(), .use_local_output = true, .block = 1}));
  EXPECT_EQ(SequenceParallel(), (SequenceParallel{.sequence_dim = 1, .use_local_output = false}));
  EXPECT_FALSE(PrepareModuleInput().use_local_output);
  EXPECT_TRUE(PrepareModuleOutput().use_local_output);
  EXPECT_FALSE(PrepareModuleInputOutput().use_local_input);
  EXPECT_TRUE(PrepareModuleInputOutput().use_local_output);
}

TEST(Style, PrintsTheFieldsThatDifferFromTheDefaults) {
  const std::pair<Style, const char*> kTexts[] = {
      {ColwiseParallel(), "colwise"},
      {ColwiseParallel{.output_layouts = Replicate()}, "colwise(output=R)"},
      {ColwiseParallel{.use_local_output = false, .block = 64, .sections = 3},
       "colwise(local=false, block=64, sections=3)"},
      {ColwiseParallel{.sections = {512, 128, 128}}, "colwise(sections=[512, 128, 128])"},
      {RowwiseParallel{.input_layouts = Replicate(), .output_layouts = Shard(1)}, "rowwise(input=R, output=S(1))"},
      {SequenceParallel(), "sequence"},
      {SequenceParallel{.sequence_dim = 0, .use_local_output = true}, "sequence(dim=0, local=true)"},
      {PrepareModuleInput{.input_layouts = Shard(1), .desired_input_layouts = Replicate()},
       "prepare_input(from=S(1), to=R)"},
      {PrepareModuleOutput{.output_layouts = {Shard(1), std::nullopt},
                           .desired_output_layouts = {Replicate(), std::nullopt}},
       "prepare_output(from=[S(1), _], to=[R, _])"},
      {PrepareModuleInputOutput{.input_layouts = {std::nullopt},
                                .desired_input_layouts = {std::nullopt},
                                .use_local_input = true,
                                .output_layouts = Partial(),
                                .desired_output_layouts = Shard(0)},
       "prepare_input_output(input_from=[_], input_to=[_], input_local=true, output_from=P(sum), output_to=S(0))"},
  };
  for (const auto& [style, text] : kTexts) EXPECT_EQ(to_string(style), text);
}

TEST(Style, AreEqualIfAllFieldsAreEqual) {
  EXPECT_EQ(Style(ColwiseParallel()), Style(ColwiseParallel()));
  EXPECT_NE(Style(ColwiseParallel()), Style(ColwiseParallel{.block = 2}));
  EXPECT_NE(Style(ColwiseParallel()),
            Style(RowwiseParallel{.input_layouts = Replicate(), .output_layouts = Shard(-1)}));
  EXPECT_NE(Sections(3), (Sections{1, 1, 1}));  // three equal sections of any size; three sections of size 1
}

TEST(Style, CheckThrowsForInvalidStyles) {
  const std::pair<Style, const char*> kBad[] = {
      {PrepareModuleInput{.input_layouts = {Shard(0), Shard(1)}, .desired_input_layouts = Replicate()},
       "prepare_input: from has 2 layouts and to has 1; write one layout per tensor in both, _ to leave a tensor "
       "unchanged"},
      {PrepareModuleOutput(), "prepare_output: no layouts; write from and to"},
      {PrepareModuleInput{.input_layouts = {std::nullopt}, .desired_input_layouts = Replicate()},
       "prepare_input: to has R for tensor 0, but from has _"},
      {PrepareModuleInputOutput{.input_layouts = Shard(0),
                                .desired_input_layouts = Shard(0),
                                .output_layouts = Shard(0),
                                .desired_output_layouts = Partial()},
       "prepare_input_output: output_to has P(sum) for tensor 0; a tensor cannot be redistributed to a partial "
       "placement"},
      {ColwiseParallel{.output_layouts = Partial()},
       "colwise: output=P(sum); the output of a colwise module is sharded"},
      {ColwiseParallel{.block = 0}, "colwise: block=0; a block needs at least one feature"},
      {RowwiseParallel{.block = -4}, "rowwise: block=-4; a block needs at least one feature"},
      {ColwiseParallel{.sections = 0}, "colwise: sections=0; use at least one section"},
      {ColwiseParallel{.sections = {8, 0}}, "colwise: sections=[8, 0]; each section needs at least one feature"},
      {SequenceParallel{.sequence_dim = 64}, "sequence: dim=64; no tensor has that many dims"},
  };
  for (const auto& bad : kBad) EXPECT_CONTAINS(error_message<UsageError>([&] { check(bad.first); }), bad.second);
  // These are valid: a partial tensor that stays partial, and an input layout without a desired layout.
  check(PrepareModuleOutput{.output_layouts = Partial(), .desired_output_layouts = Partial()});
  check(PrepareModuleInput{.input_layouts = Shard(0), .desired_input_layouts = {std::nullopt}});
  check(RowwiseParallel{.output_layouts = Partial()});
}

}  // namespace
}  // namespace tessera
