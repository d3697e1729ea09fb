#pragma once
#include <filesystem>

namespace tessera::cli {

std::filesystem::path program_path();   // the running program
std::filesystem::path libtorch_path();  // the folder that has include/ and lib/ of the LibTorch in this process

}  // namespace tessera::cli
