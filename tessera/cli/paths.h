#pragma once
#include <filesystem>

namespace tessera::cli {

std::filesystem::path program_path();   // of this executable
std::filesystem::path libtorch_path();  // folder with include/ and lib/ of the loaded LibTorch

}  // namespace tessera::cli
