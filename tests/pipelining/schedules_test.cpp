#include "tessera/pipelining/detail/schedules.h"

#include <gtest/gtest.h>

#include <cctype>
#include <fstream>
#include <iomanip>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/pipelining/detail/lowering.h"
#include "tessera/pipelining/detail/simulate.h"
#include "tessera/testing/expect_error.h"

namespace tessera::pipelining {
namespace {

std::string fingerprint(const ActionTable& table) {
  uint64_t value = 0xcbf29ce484222325;
  for (const char c : to_csv(table)) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  std::ostringstream out;
  out << std::hex << std::setw(8) << std::setfill('0') << (value >> 32);
  return out.str();
}

// tests/parity/pipeline_tables.py wrote the file.
TEST(Schedules, EqualPyTorchsEntryByEntry) {
  std::ifstream file(std::string(TESSERA_PARITY_SCRIPTS) + "/../pipelining/pytorch_tables.txt");
  std::string name, compute, with_communication;
  PipelineShape shape;
  int64_t tables = 0;
  while (file >> name >> shape.ranks >> shape.stages_per_rank >> shape.microbatches >> compute >> with_communication) {
    SCOPED_TRACE(::testing::Message() << name << " ranks " << shape.ranks << " stages per rank "
                                      << shape.stages_per_rank << " microbatches " << shape.microbatches);
    ActionTable table = compute_schedule(name, shape);
    const ActionTable lowered = lower_schedule(table, stage_ranks(name, shape), shape.microbatches);
    // No rank waits for ever.
    EXPECT_NO_THROW(simulate(lowered, std::vector<StageCost>(static_cast<size_t>(shape.stages()))));
    if (with_communication == "-") {
      for (RankActions& row : table) row = add_reduce_grad(row, shape.microbatches);
      EXPECT_EQ(fingerprint(table), compute);
    } else {
      EXPECT_EQ(fingerprint(table), compute);
      EXPECT_EQ(fingerprint(lowered), with_communication);
    }
    ++tables;
  }
  EXPECT_GE(tables, 1000);
}

TEST(Schedules, TextIsReadBack) {
  for (const std::string& name : schedule_names()) {
    const PipelineShape shape{4, name == "GPipe" || name == "1F1B" ? 1 : 2, 8};
    const ActionTable table = lower_schedule(compute_schedule(name, shape), stage_ranks(name, shape), 8);
    EXPECT_EQ(parse_csv(to_csv(table)), table) << name;
  }
}

TEST(Schedules, WrongTextIsNamed) {
  for (const char* text :
       {"F0", "2X0", "2F", "-1F0", "1UNSHARD3", "(0F0;1B0", "(0F0;1B0)F", "99999999999999999999F0", "1F0 "})
    EXPECT_THROW(parse_action(text), UsageError) << text;
  EXPECT_ERROR(UsageError, parse_csv("0F0,0F1\n1F0,,1Q1\n"), "line 2, column 3");
}

// PyTorch: test_get_schedule_class.
TEST(Schedules, TheCaseOfANameDoesNotMatter) {
  for (const std::string& name : schedule_names()) {
    std::string other = name;
    for (char& letter : other)
      letter = static_cast<char>(std::islower(letter) ? std::toupper(letter) : std::tolower(letter));
    EXPECT_EQ(canonical_name(other), name);
  }
  EXPECT_ERROR(UsageError, canonical_name("ScheduleThatDoesNotExist"), "GPipe", "ZBVZeroBubble");
}

// PyTorch: TestValidateSchedule, on tables of the user; wrong ones are in schedule_test.cpp.
TEST(Schedules, MinimalTablesAreLowered) {
  for (const char* text : {"0F0,0B0\n1F0,1B0\n", "0F0,0I0,0W0\n1F0,1I0,1W0\n"})
    EXPECT_NO_THROW(lower_schedule(parse_csv(text), {0, 1}, 1)) << text;
}

TEST(Schedules, ShapesThatDoNotExistAreRefused) {
  EXPECT_ERROR(UsageError, compute_schedule("1F1B", {2, 2, 4}), "Interleaved1F1B");
  EXPECT_ERROR(UsageError, compute_schedule("ZBVZeroBubble", {2, 1, 4}), "4 stages");
  EXPECT_ERROR(UsageError, compute_schedule("DualPipeV", {4, 2, 4}), "8 stages");
  EXPECT_ERROR(UsageError, compute_schedule("Interleaved1F1B", {4, 2, 9}), "8 or 10");
  EXPECT_ERROR(UsageError, compute_schedule("ZeroBubble", {4, 2, 8}), "ZBVZeroBubble");
  EXPECT_ERROR(UsageError, compute_schedule("GPipe", {0, 1, 8}), "at least 1");
}

TEST(Schedules, TableThatCannotRunIsRefused) {
  // Rank 1 wants to go back before it has gone forward with microbatch 0, which rank 0 sends last.
  const ActionTable planted = parse_csv("0F1,0B1,0F0,0B0\n1F0,1B0,1F1,1B1\n");
  EXPECT_ERROR(UsageError, add_send_recv(planted, {0, 1}), "waits for ever");
}

}  // namespace
}  // namespace tessera::pipelining
