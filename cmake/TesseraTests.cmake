# One program per folder of tests/ ("layer"), one ctest entry per file. tests/rules/matmul_test.cpp is part of the program
# test_rules and is the entry rules.matmul; the target tests.rules builds the folder. Files under tests/seeds get one
# entry per test case: file.case.
find_package(GTest QUIET)
if(NOT GTest_FOUND)
  message(WARNING "The tests are left out: GoogleTest (libgtest-dev) is missing. `make test` installs it.")
  return()
endif()
find_package(rapidcheck QUIET)
set(TESSERA_TEST_TIMEOUT 300 CACHE STRING "Seconds after which a test has failed")

function(tessera_test_flags target)
  tessera_our_code(${target})
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-Og>)  # tests run for milliseconds, compile for seconds
  if(test_headers AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    target_compile_options(${target} PRIVATE -fpch-preprocess)  # ccache asks for it
  endif()
endfunction()

# Tests choose between two precompiled headers by what they include. A unity build of some of the tests has too few units
# to gain from them.
set(test_headers ${TESSERA_PCH})
if(TESSERA_TEST_FILES AND TESSERA_UNITY)
  set(test_headers OFF)
endif()
function(tessera_test_headers name)
  add_library(${name} OBJECT ${CMAKE_BINARY_DIR}/${name}.cpp)
  if(NOT EXISTS ${CMAKE_BINARY_DIR}/${name}.cpp)
    file(WRITE ${CMAKE_BINARY_DIR}/${name}.cpp "")
  endif()
  target_precompile_headers(${name} PRIVATE ${ARGN} <gtest/gtest.h>)
  target_link_libraries(${name} PRIVATE tessera GTest::gtest)
  tessera_test_flags(${name})
endfunction()
if(test_headers)
  tessera_test_headers(test_headers_aten <ATen/core/Tensor.h> <ATen/ops/ones.h>)
  tessera_test_headers(test_headers_torch <torch/torch.h>)
  set_target_properties(test_headers_aten test_headers_torch PROPERTIES EXCLUDE_FROM_ALL ON)
endif()

# Ranks are threads or processes of a test, so LibTorch's own loops use one thread. Generated kernels are cached in the
# build folder, and so is their key.
set(test_environment OMP_NUM_THREADS=1 TESSERA_CACHE_DIR=${CMAKE_BINARY_DIR}/kernels
                     XDG_STATE_HOME=${CMAKE_BINARY_DIR}/state)
if(TESSERA_SANITIZE MATCHES address)
  list(APPEND test_environment ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1
                               UBSAN_OPTIONS=print_stacktrace=1)
elseif(TESSERA_SANITIZE MATCHES thread)
  # Without reports of misused mutexes: LibTorch's functions lock unseen, and end in a jump to pthread_mutex_unlock,
  # which the sanitizer attributes to us. Our locks are lock_guards.
  set(suppressions ${CMAKE_CURRENT_SOURCE_DIR}/tools/tsan.supp)
  list(APPEND test_environment TSAN_OPTIONS=suppressions=${suppressions}:halt_on_error=0:report_mutex_bugs=0)
endif()

# The Python whose torch we link, for tests that run real PyTorch.
find_program(tessera_torch_python NAMES python3 HINTS ${TESSERA_TORCH_DIR}/../../../../bin NO_CACHE)

add_library(seed_each_test OBJECT ${CMAKE_CURRENT_SOURCE_DIR}/tests/seeding.cpp)
tessera_our_code(seed_each_test)
target_link_libraries(seed_each_test PRIVATE tessera GTest::gtest)

if(TARGET tessera_program)
  add_executable(launch_probe tests/launch/probe.cpp)  # a rank for launchers to start
  tessera_test_flags(launch_probe)
  target_link_libraries(launch_probe PRIVATE tessera_train tessera_testing)
  set_target_properties(launch_probe PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_library(count_syncs MODULE tests/fixtures/count_syncs.cpp)  # for LD_PRELOAD
  target_link_libraries(count_syncs PRIVATE ${CMAKE_DL_LIBS})
endif()

# Sets in the caller: `includes`, the #include lines of a test file and of headers beside it.
function(tessera_read_includes file)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  get_filename_component(folder ${file} DIRECTORY)
  file(STRINGS ${file} found REGEX "^#include")
  foreach(include ${found})
    string(REGEX REPLACE ".*\"(.*)\".*" "\\1" header ${include})
    if(EXISTS ${folder}/${header})
      file(STRINGS ${folder}/${header} more REGEX "^#include")
      list(APPEND found ${more})
    endif()
  endforeach()
  set(includes "${found}" PARENT_SCOPE)
endfunction()

# The program of a layer. Sets in the caller: `kept`, the files that can be built here.
set(test_libraries tessera tessera_testing $<TARGET_NAME_IF_EXISTS:tessera_train>)
function(tessera_test_program target layer)
  set(kept "")
  set(all_includes "")
  set(starts_program FALSE)
  set(needs_paths FALSE)
  foreach(file ${ARGN})
    tessera_read_includes(${file})
    file(STRINGS ${file} mentions_program REGEX "TESSERA_PROGRAM")
    file(STRINGS ${file} mentions_paths REGEX "TESSERA_(TORCH_PYTHON|PARITY_|LAUNCH_TESTS)")
    set(missing "")
    if(includes MATCHES "rapidcheck" AND NOT TARGET rapidcheck)
      set(missing "RapidCheck (librapidcheck-dev) is missing")
    elseif(includes MATCHES "benchmarks/" AND NOT TARGET tessera_benches)
      set(missing "the benches are not built")
    elseif((includes MATCHES "tessera/cli/" OR mentions_program OR layer STREQUAL launch) AND NOT TARGET tessera_program)
      set(missing "the program is not built")
    endif()
    if(missing)
      message(WARNING "${file} is left out: ${missing}")
    else()
      list(APPEND kept ${file})
      list(APPEND all_includes ${includes})
      if(mentions_program OR layer STREQUAL launch)
        set(starts_program TRUE)
      endif()
      if(mentions_paths OR includes MATCHES "run_python.h|shell.h")
        set(needs_paths TRUE)
      endif()
    endif()
  endforeach()
  set(kept "${kept}" PARENT_SCOPE)
  if(NOT kept)
    return()
  endif()

  add_executable(${target} ${kept} $<TARGET_OBJECTS:seed_each_test>)
  tessera_test_flags(${target})
  tessera_unity(${target})
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/tests)
  target_link_libraries(${target} PRIVATE ${test_libraries} GTest::gtest GTest::gtest_main)
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  if(layer STREQUAL docs)
    target_include_directories(${target} PRIVATE ${CMAKE_BINARY_DIR}/doc_blocks)
    target_compile_options(${target} PRIVATE -Wno-unused-parameter -Wno-unused-variable)  # blocks show, they need not use
  endif()
  if(all_includes MATCHES "rapidcheck")
    target_link_libraries(${target} PRIVATE rapidcheck)
  endif()
  if(all_includes MATCHES "benchmarks/")
    target_link_libraries(${target} PRIVATE tessera_benches)
  elseif(all_includes MATCHES "tessera/cli/")
    target_link_libraries(${target} PRIVATE tessera_cli)
  endif()
  if(all_includes MATCHES "ProcessGroupWrapper")  # whose header includes gloo's
    target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/tessera/comm/detail/gloo_stub)
  endif()
  if(test_headers)
    if(all_includes MATCHES "torch/(torch|nn|optim|data)[/.]|ATen/ATen.h|tessera/(tessera.h|nn/)")
      target_precompile_headers(${target} REUSE_FROM test_headers_torch)
    else()
      target_precompile_headers(${target} REUSE_FROM test_headers_aten)
    endif()
  endif()
  if(starts_program)
    add_dependencies(${target} tessera_program launch_probe count_syncs)
    if(TARGET tessera_bench)
      add_dependencies(${target} tessera_bench)
    endif()
    target_compile_definitions(${target} PRIVATE "TESSERA_PROGRAM=\"$<TARGET_FILE:tessera_program>\""
                                                 "TESSERA_PROBE=\"$<TARGET_FILE:launch_probe>\""
                                                 "TESSERA_COUNT_SYNCS=\"$<TARGET_FILE:count_syncs>\"")
  endif()
  if(needs_paths)  # only here: with paths in its flags, a file misses the compiler cache in every other checkout
    set(python $<$<BOOL:${tessera_torch_python}>:${tessera_torch_python}>)
    target_compile_definitions(${target} PRIVATE "TESSERA_TORCH_PYTHON=\"${python}\"" "TESSERA_PARITY_PYTHON=\"${python}\""
                                                 "TESSERA_PARITY_SCRIPTS=\"${CMAKE_CURRENT_SOURCE_DIR}/tests/parity\""
                                                 "TESSERA_LAUNCH_TESTS=\"${CMAKE_CURRENT_SOURCE_DIR}/tests/launch\"")
  endif()
  add_custom_target(tests.${layer} DEPENDS ${target})
endfunction()

# The ctest entry, or entries, of a file.
function(tessera_test_entries target layer file)
  file(RELATIVE_PATH name ${CMAKE_CURRENT_SOURCE_DIR}/tests ${file})
  string(REGEX REPLACE "_test\\.cpp$" "" name ${name})
  string(REPLACE "/" "." name ${name})
  file(READ ${file} text)
  string(REGEX MATCHALL "[\n][A-Z_]*(TEST|TEST_F|TEST_P|PROP)\\([A-Za-z0-9_]+,[ \n]*[A-Za-z0-9_]+" cases "${text}")
  if(NOT cases)
    message(FATAL_ERROR "${file} has no TEST(Suite, case)")
  endif()
  set(filter "")
  foreach(case ${cases})
    string(REGEX REPLACE ".*\\(([A-Za-z0-9_]+),[ \n]*([A-Za-z0-9_]+)" "\\1.\\2" full_name "${case}")
    if(case MATCHES "TEST_P")
      set(full_name "${full_name}/*:*/${full_name}/*")
    endif()
    list(APPEND filter ${full_name})
  endforeach()

  set(labels ${layer})
  if(name MATCHES "soak")
    list(APPEND labels soak)
  endif()
  set(entries ${name})
  if(layer STREQUAL seeds)
    set(entries "")
    string(REGEX REPLACE "^seeds\\." "" stem ${name})
    foreach(full_name ${filter})
      string(REGEX REPLACE "^.*\\." "" case ${full_name})
      set(entry ${stem}.${case})
      if(TEST ${entry})  # two suites have a case of this name
        set(entry ${stem}.${full_name})
      endif()
      add_test(NAME ${entry} COMMAND ${target} --gtest_filter=${full_name})
      list(APPEND entries ${entry})
    endforeach()
  else()
    list(JOIN filter ":" filter)
    add_test(NAME ${name} COMMAND ${target} --gtest_filter=${filter})
  endif()
  set(timeout ${TESSERA_TEST_TIMEOUT})
  if("soak" IN_LIST labels)
    set(timeout 7200)
  endif()
  set_tests_properties(${entries} PROPERTIES TIMEOUT ${timeout} LABELS "${labels}" ENVIRONMENT "${test_environment}"
                                             FAIL_REGULAR_EXPRESSION "Running 0 tests")

  # A skipped test prints its reason, and ctest counts it: no GPU, no NVRTC, no launcher, no browser, no PyTorch.
  if(name MATCHES "(cuda|browser|nvrtc)$" OR layer MATCHES "^(seeds|parity|launch)$")
    set_tests_properties(${entries} PROPERTIES SKIP_REGULAR_EXPRESSION "\\[  SKIPPED \\]")
  endif()
  if(name STREQUAL compile.trust_cache)  # without root, one of its tests is skipped
    set_tests_properties(${entries} PROPERTIES SKIP_REGULAR_EXPRESSION "\\[  SKIPPED \\]")
  endif()
  # Thread ranks mostly wait; processes each load LibTorch first.
  file(STRINGS ${file} starts_processes REGEX "spawn_ranks|run_fault_cases|TESSERA_PROGRAM")
  if(starts_processes AND NOT layer STREQUAL seeds OR layer STREQUAL launch
     OR name MATCHES "^parity.(data_parallel|tensor_parallel|fsdp)$")
    set_tests_properties(${entries} PROPERTIES PROCESSORS 2)
  endif()
endfunction()

# The instruction count of a hooked call is that of optimised code.
set_source_files_properties(tests/nn/holder_cost_test.cpp PROPERTIES COMPILE_OPTIONS -O1 SKIP_UNITY_BUILD_INCLUSION ON
                                                                     SKIP_PRECOMPILE_HEADERS ON)
file(GLOB_RECURSE test_files CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/*_test.cpp)
if(TESSERA_TEST_FILES)
  list(FILTER test_files INCLUDE REGEX "${TESSERA_TEST_FILES}")
endif()
if(NOT TARGET tessera_cli)  # one of the fuzz targets reads config files
  list(FILTER test_files EXCLUDE REGEX "/tests/fuzz/")
endif()
include(${CMAKE_CURRENT_SOURCE_DIR}/cmake/TesseraDocs.cmake)
set(layers "")
foreach(file ${test_files})
  file(RELATIVE_PATH layer ${CMAKE_CURRENT_SOURCE_DIR}/tests ${file})
  string(REGEX REPLACE "(/|_test\\.cpp).*" "" layer ${layer})
  list(APPEND layers ${layer})
  list(APPEND files_${layer} ${file})
endforeach()
list(REMOVE_DUPLICATES layers)
foreach(layer ${layers})
  tessera_test_program(test_${layer} ${layer} ${files_${layer}})
  foreach(file ${kept})
    tessera_test_entries(test_${layer} ${layer} ${file})
  endforeach()
endforeach()

# The fuzz targets, which replay their corpora (TesseraFuzz.cmake has the fuzzers).
if(TARGET test_fuzz)
  file(GLOB fuzz_targets CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/fuzz/*_fuzz.cpp
       ${CMAKE_CURRENT_SOURCE_DIR}/tests/fuzz/fuzz_targets.cpp)
  set_source_files_properties(${fuzz_targets} PROPERTIES UNITY_GROUP fuzz_targets)
  target_sources(test_fuzz PRIVATE ${fuzz_targets})
  target_link_libraries(test_fuzz PRIVATE tessera_cli)
  target_compile_definitions(test_fuzz PRIVATE "TESSERA_CORPUS=\"${CMAKE_CURRENT_SOURCE_DIR}/tests/fuzz/corpus\"")
endif()

if(TESSERA_SOURCES)  # a part of the library: no checks of the sources, no consumer, no examples
  return()
endif()

# Checks of the source and of what was built.
find_program(PYTHON3 python3)
if(PYTHON3)
  set(check_layers ${PYTHON3} ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_layers.py)
  add_test(NAME layers COMMAND ${check_layers} ${CMAKE_CURRENT_SOURCE_DIR}/tessera)
  add_test(NAME layers.planted COMMAND ${check_layers} --expect ${CMAKE_CURRENT_SOURCE_DIR}/tests/layers/planted)
  add_test(NAME public_headers COMMAND ${PYTHON3} ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_public_headers.py)
  add_test(NAME public_headers.planted COMMAND ${PYTHON3} ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_public_headers.py --planted)
  add_test(NAME words COMMAND ${PYTHON3} ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_words.py)
  add_test(NAME examples COMMAND ${PYTHON3} ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_examples.py)
  add_test(NAME examples.planted COMMAND ${PYTHON3} ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_examples.py --planted)
  add_test(NAME links COMMAND ${PYTHON3} ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_links.py)
  add_test(NAME links.planted COMMAND ${PYTHON3} ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_links.py --planted)
  add_test(NAME words.planted COMMAND ${PYTHON3} ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_words.py --expect)
endif()
set(shipped $<TARGET_FILE:tessera>)
if(TARGET tessera_train)
  list(APPEND shipped $<TARGET_FILE:tessera_train>)
endif()
if(TARGET tessera_program)
  list(APPEND shipped $<TARGET_FILE:tessera_program>)
endif()
add_test(NAME no_python COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_no_python ${shipped})
if(NOT TESSERA_SANITIZE)
  add_test(NAME consumer
           COMMAND ${CMAKE_COMMAND} -DBUILD=${CMAKE_BINARY_DIR} -DSOURCE=${CMAKE_CURRENT_SOURCE_DIR}
                   -DCOMPILER=${CMAKE_CXX_COMPILER}
                   -DBUILD_TYPE=${CMAKE_BUILD_TYPE} "-DFLAGS_RELEASE=${CMAKE_CXX_FLAGS_RELEASE}"
                   "-DFLAGS_DEBUG=${CMAKE_CXX_FLAGS_DEBUG}" -DMOLD=${TESSERA_HAS_MOLD} "-DGENERATOR=${CMAKE_GENERATOR}"
                   -DTORCH=${TESSERA_TORCH_DIR} -P ${CMAKE_CURRENT_SOURCE_DIR}/tests/consumer/run.cmake)
  set_tests_properties(consumer PROPERTIES TIMEOUT 900 PROCESSORS 2)
endif()

include(TesseraExamples)

# A process with Python's autograd engine in it is refused.
if(tessera_torch_python AND NOT TESSERA_SANITIZE)
  add_library(python_refused_probe SHARED tests/python_refused/probe.cpp)
  tessera_our_code(python_refused_probe)
  target_link_libraries(python_refused_probe PRIVATE tessera)
  add_test(NAME python_refused COMMAND ${tessera_torch_python} ${CMAKE_CURRENT_SOURCE_DIR}/tests/python_refused/run.py
                                       $<TARGET_FILE:python_refused_probe>)
  set_tests_properties(python_refused PROPERTIES SKIP_REGULAR_EXPRESSION "SKIPPED" TIMEOUT 120)
endif()
