// Compiles and runs the program of docs/first_program.md.
#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <iostream>
#include <regex>

namespace first_program_page {

// The program as a function. Only main() may end without a return.
#define main first_program_main
#define int void
#include "first_program_1.inc"
#undef int
#undef main

TEST(FirstProgramPage, ItLearnsThePlane) {
  ::testing::internal::CaptureStdout();
  first_program_main();
  const auto printed = ::testing::internal::GetCapturedStdout();
  EXPECT_TRUE(std::regex_search(printed, std::regex(" 3\\.0.*-2\\.0|2\\.9.*-1\\.9"))) << printed;
}

}  // namespace first_program_page
