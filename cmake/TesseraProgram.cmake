# The program `tessera`: tessera/cli/ and the benches. Left out, and said so, where its two header libraries are missing.
find_package(CLI11 QUIET)
find_package(nlohmann_json QUIET)
if(NOT CLI11_FOUND OR NOT nlohmann_json_FOUND)
  message(WARNING "The program `tessera` is not built: CLI11 (libcli11-dev) or nlohmann-json (nlohmann-json3-dev) is "
                  "missing. The library and its tests do not need them.")
  return()
endif()
file(GLOB_RECURSE program_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tessera/cli/*.cpp
                                                    ${CMAKE_CURRENT_SOURCE_DIR}/benchmarks/*.cpp)
list(FILTER program_sources EXCLUDE REGEX "/cli/main\\.cpp$")
find_path(TESSERA_TOML_INCLUDE toml++/toml.h)  # header only
mark_as_advanced(TESSERA_TOML_INCLUDE)
if(TESSERA_TOML_INCLUDE)
  list(FILTER program_sources EXCLUDE REGEX "/cli/no_toml\\.cpp$")
else()
  message(WARNING "tessera train reads no --config: toml++ (libtomlplusplus-dev) is missing.")
  list(FILTER program_sources EXCLUDE REGEX "/cli/toml\\.cpp$")
endif()
add_library(tessera_cli STATIC ${program_sources})  # apart from main.cpp, so that tests can link it
tessera_our_code(tessera_cli)
target_link_libraries(tessera_cli PUBLIC tessera CLI11::CLI11 nlohmann_json::nlohmann_json)
if(TESSERA_TOML_INCLUDE)
  target_include_directories(tessera_cli SYSTEM PRIVATE ${TESSERA_TOML_INCLUDE})
endif()
if(TESSERA_PCH)
  tessera_precompiled(tessera_cli <CLI/CLI.hpp> <torch/csrc/distributed/c10d/ProcessGroup.hpp> <torch/library.h>
                      <torch/nn/module.h> <torch/optim/optimizer.h>)
endif()
add_executable(tessera_program tessera/cli/main.cpp)
tessera_our_code(tessera_program)
target_link_libraries(tessera_program PRIVATE tessera_cli)
set_target_properties(tessera_program PROPERTIES OUTPUT_NAME tessera)
