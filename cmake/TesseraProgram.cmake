# The program `tessera`: tessera/cli/. The benches: benchmarks/, a program of their own that `tessera bench` starts. Either is
# left out, and said so, where the header libraries it needs are missing.
find_package(CLI11 QUIET)
if(NOT CLI11_FOUND)
  message(WARNING "The program `tessera` is not built: CLI11 (libcli11-dev) is missing. The library and its tests do not "
                  "need it.")
  return()
endif()
file(GLOB program_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tessera/cli/*.cpp)
file(GLOB_RECURSE bench_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/benchmarks/*.cpp)
list(FILTER program_sources EXCLUDE REGEX "/cli/main\\.cpp$")
list(FILTER bench_sources EXCLUDE REGEX "/main\\.cpp$")
find_path(TESSERA_TOML_INCLUDE toml++/toml.h)  # header only
mark_as_advanced(TESSERA_TOML_INCLUDE)
if(TESSERA_TOML_INCLUDE)
  list(FILTER program_sources EXCLUDE REGEX "/cli/no_toml\\.cpp$")
else()
  message(WARNING "tessera train reads no --config: toml++ (libtomlplusplus-dev) is missing.")
  list(FILTER program_sources EXCLUDE REGEX "/cli/toml\\.cpp$")
endif()

# `tessera rules coverage` has the list of ops in it, so that the program needs no file of the sources.
set(pytorch_ops ${CMAKE_CURRENT_SOURCE_DIR}/tools/pytorch_dtensor_ops.txt)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${pytorch_ops})
file(READ ${pytorch_ops} TESSERA_PYTORCH_OPS)
configure_file(${CMAKE_CURRENT_SOURCE_DIR}/cmake/pytorch_ops.cpp.in ${CMAKE_CURRENT_BINARY_DIR}/pytorch_ops.cpp @ONLY)
# The page of `tessera report`, likewise.
set(report_page ${CMAKE_CURRENT_SOURCE_DIR}/tessera/cli/report_page.html)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${report_page})
file(READ ${report_page} TESSERA_REPORT_PAGE)
configure_file(${CMAKE_CURRENT_SOURCE_DIR}/cmake/report_page.cpp.in ${CMAKE_CURRENT_BINARY_DIR}/report_page.cpp @ONLY)

function(tessera_program_main target name part main)
  add_executable(${target} ${main})
  tessera_our_code(${target})
  target_link_libraries(${target} PRIVATE ${part})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${name})
endfunction()

add_library(tessera_cli STATIC ${program_sources} ${CMAKE_CURRENT_BINARY_DIR}/pytorch_ops.cpp
            ${CMAKE_CURRENT_BINARY_DIR}/report_page.cpp)  # apart from main.cpp, so that tests can link it
set_source_files_properties(${CMAKE_CURRENT_BINARY_DIR}/pytorch_ops.cpp ${CMAKE_CURRENT_BINARY_DIR}/report_page.cpp
                            PROPERTIES SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON)  # strings alone
tessera_our_code(tessera_cli)
tessera_setup_code(tessera_cli)
target_link_libraries(tessera_cli PUBLIC tessera_train tessera_testing CLI11::CLI11)
tessera_unity(tessera_cli 55000)  # it is built last, by two cores
if(TESSERA_TOML_INCLUDE)
  target_include_directories(tessera_cli SYSTEM PRIVATE ${TESSERA_TOML_INCLUDE})
endif()
tessera_program_main(tessera_program tessera tessera_cli tessera/cli/main.cpp)

add_library(tessera_benches STATIC ${bench_sources})
tessera_our_code(tessera_benches)
target_link_libraries(tessera_benches PUBLIC tessera_cli)
tessera_unity(tessera_benches 40000)
tessera_program_main(tessera_bench tessera-bench tessera_benches benchmarks/main.cpp)
