# One program per tests/**/x_test.cpp. tests/rules/matmul_test.cpp is target test_rules.matmul and ctest entry
# rules.matmul; `tests.rules` builds a whole folder. Files under tests/seeds get one entry per case: file.case.
find_package(GTest QUIET)
if(NOT GTest_FOUND)
  message(WARNING "The tests are left out: GoogleTest (libgtest-dev) is missing. `make test` installs it.")
  return()
endif()
find_package(rapidcheck QUIET)
set(TESSERA_TEST_TIMEOUT 300 CACHE STRING "Seconds after which a test has failed")

# LibTorch's and GoogleTest's headers are most of what compiling a test costs (g++ 12, one core: 4.5 s a file without,
# 1.2 s with; 15 s and 5 s where torch/torch.h is included). Tests choose between two by what they include.
function(tessera_test_headers name)
  add_library(${name} OBJECT ${CMAKE_BINARY_DIR}/${name}.cpp)
  if(NOT EXISTS ${CMAKE_BINARY_DIR}/${name}.cpp)
    file(WRITE ${CMAKE_BINARY_DIR}/${name}.cpp "")
  endif()
  target_precompile_headers(${name} PRIVATE ${ARGN} <gtest/gtest.h>)
  target_link_libraries(${name} PRIVATE tessera GTest::gtest)
  tessera_test_flags(${name})
endfunction()

function(tessera_test_flags target)
  tessera_our_code(${target})
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)  # they run for milliseconds, compile for seconds
  if(TESSERA_PCH AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    target_compile_options(${target} PRIVATE -fpch-preprocess)  # ccache asks for it
  endif()
endfunction()

if(TESSERA_PCH)
  tessera_test_headers(test_headers_aten <ATen/core/Tensor.h> <ATen/ops/ones.h>)
  tessera_test_headers(test_headers_torch <torch/torch.h>)
  set_target_properties(test_headers_aten test_headers_torch PROPERTIES EXCLUDE_FROM_ALL ON)
endif()

# Ranks are threads or processes of a test, so one thread each for LibTorch's own loops. Generated kernels are kept with
# the build.
set(test_environment OMP_NUM_THREADS=1 TESSERA_CACHE_DIR=${CMAKE_BINARY_DIR}/kernels)
if(TESSERA_SANITIZE MATCHES address)
  list(APPEND test_environment ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1
                               UBSAN_OPTIONS=print_stacktrace=1)
elseif(TESSERA_SANITIZE MATCHES thread)
  # Not misused mutexes: LibTorch's functions lock unseen and end in a jump to pthread_mutex_unlock, which is seen, as
  # ours. Our locks are lock_guards.
  set(suppressions ${CMAKE_CURRENT_SOURCE_DIR}/tools/tsan.supp)
  list(APPEND test_environment TSAN_OPTIONS=suppressions=${suppressions}:halt_on_error=0:report_mutex_bugs=0)
endif()

function(tessera_test_properties entry)  # further arguments: labels
  set(timeout ${TESSERA_TEST_TIMEOUT})
  if("soak" IN_LIST ARGN)
    set(timeout 7200)
  endif()
  set_tests_properties(${entry} PROPERTIES TIMEOUT ${timeout} LABELS "${ARGN}" ENVIRONMENT "${test_environment}")
endfunction()

# One entry per TEST, TEST_F, TEST_P, or macro of ours that ends in TEST, of the file.
function(tessera_add_cases name target file)
  file(READ ${file} text)
  string(REGEX MATCHALL "[\n][A-Z_]*TEST(_F|_P)?\\([A-Za-z0-9_]+,[ \n]*[A-Za-z0-9_]+" cases "${text}")
  if(NOT cases)
    message(FATAL_ERROR "${file} is under tests/seeds but has no TEST(Suite, case)")
  endif()
  foreach(case ${cases})
    string(REGEX REPLACE ".*\\(([A-Za-z0-9_]+),[ \n]*([A-Za-z0-9_]+)" "\\1;\\2" suite_and_case "${case}")
    list(GET suite_and_case 0 suite)
    list(GET suite_and_case 1 case)
    set(entry ${name}.${case})
    if(TEST ${entry})  # the same name in two suites
      set(entry ${name}.${suite}.${case})
    endif()
    add_test(NAME ${entry} COMMAND ${target} --gtest_filter=${suite}.${case}:*/${suite}.${case}/*)
    tessera_test_properties(${entry} ${ARGN})
    set_tests_properties(${entry} PROPERTIES FAIL_REGULAR_EXPRESSION "Running 0 tests"
                                             SKIP_REGULAR_EXPRESSION "\\[  SKIPPED \\]")
  endforeach()
endfunction()

# The Python whose torch we link, for tests that run real PyTorch beside us.
find_program(tessera_torch_python NAMES python3 HINTS ${TESSERA_TORCH_DIR}/../../../../bin NO_CACHE)

add_library(seed_each_test OBJECT ${CMAKE_CURRENT_SOURCE_DIR}/tests/seeding.cpp)
tessera_our_code(seed_each_test)
target_link_libraries(seed_each_test PRIVATE tessera GTest::gtest)

set(test_libraries tessera tessera_testing $<TARGET_NAME_IF_EXISTS:tessera_train>)
function(tessera_add_test file)
  file(RELATIVE_PATH name ${CMAKE_CURRENT_SOURCE_DIR}/tests ${file})
  get_filename_component(folder ${name} DIRECTORY)
  string(REGEX REPLACE "/.*" "" layer "${folder}")
  string(REGEX REPLACE "_test\\.cpp$" "" name ${name})
  string(REPLACE "/" "." name ${name})
  set(target test_${name})

  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})  # what follows was read from it
  file(STRINGS ${file} includes REGEX "^#include")
  foreach(include ${includes})  # and what a header beside it includes
    string(REGEX REPLACE ".*\"(.*)\".*" "\\1" header ${include})
    if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/tests/${folder}/${header})
      file(STRINGS ${CMAKE_CURRENT_SOURCE_DIR}/tests/${folder}/${header} more REGEX "^#include")
      list(APPEND includes ${more})
    endif()
  endforeach()
  file(STRINGS ${file} starts_processes REGEX "spawn_ranks|run_cells")
  file(STRINGS ${file} starts_program REGEX "TESSERA_PROGRAM")
  if(includes MATCHES "rapidcheck" AND NOT TARGET rapidcheck)
    message(WARNING "${name} is left out: RapidCheck (librapidcheck-dev) is missing")
    return()
  endif()
  set(part "")
  if(includes MATCHES "benchmarks/")
    set(part tessera_benches)
  elseif(includes MATCHES "tessera/cli/")
    set(part tessera_cli)
  endif()
  if(part AND NOT TARGET ${part})
    message(WARNING "${name} is left out: ${part} is not built")
    return()
  endif()

  if((layer STREQUAL launch OR starts_program) AND NOT TARGET tessera_program)
    message(WARNING "${name} is left out: the program is not built")
    return()
  endif()

  add_executable(${target} ${file} $<TARGET_OBJECTS:seed_each_test>)
  tessera_test_flags(${target})
  target_link_libraries(${target} PRIVATE ${test_libraries} GTest::gtest GTest::gtest_main)
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  if(includes MATCHES "rapidcheck")
    target_link_libraries(${target} PRIVATE rapidcheck)
  endif()
  if(part)
    target_link_libraries(${target} PRIVATE ${part})
  endif()
  if(includes MATCHES "ProcessGroupWrapper")  # whose header wants gloo's
    target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/tessera/comm/detail/gloo_stub)
  endif()
  if(TESSERA_PCH)
    if(includes MATCHES "torch/(torch|nn|optim|data)[/.]|ATen/ATen.h|tessera/(tessera.h|nn/)")
      target_precompile_headers(${target} REUSE_FROM test_headers_torch)
    else()
      target_precompile_headers(${target} REUSE_FROM test_headers_aten)
    endif()
  endif()
  if(layer)
    if(NOT TARGET tests.${layer})
      add_custom_target(tests.${layer})
    endif()
    add_dependencies(tests.${layer} ${target})
  endif()

  set(labels ${layer})
  if(name MATCHES "soak")
    list(APPEND labels soak)
  endif()
  if(layer STREQUAL seeds)
    string(REGEX REPLACE "^seeds\\." "" stem ${name})
    tessera_add_cases(${stem} ${target} ${file} ${labels})
  else()
    add_test(NAME ${name} COMMAND ${target})
    tessera_test_properties(${name} ${labels})
    if(name MATCHES "cuda$")  # one test, which says why it is skipped; ctest counts it
      set_tests_properties(${name} PROPERTIES SKIP_REGULAR_EXPRESSION "SKIPPED \\] Cuda")
    endif()
    if(layer STREQUAL parity)  # skipped where there is no such Python, and counted
      target_compile_definitions(${target} PRIVATE
                                 "TESSERA_PARITY_PYTHON=\"$<$<BOOL:${tessera_torch_python}>:${tessera_torch_python}>\""
                                 "TESSERA_PARITY_SCRIPTS=\"${CMAKE_CURRENT_SOURCE_DIR}/tests/parity\"")
      set_tests_properties(${name} PROPERTIES SKIP_REGULAR_EXPRESSION "\\[  SKIPPED \\]")
    endif()
    if(layer STREQUAL launch)  # skipped, and counted, where the launcher they need is not there
      add_dependencies(${target} tessera_program launch_probe)
      if(TARGET tessera_bench)
        add_dependencies(${target} tessera_bench)
      endif()
      target_compile_definitions(${target} PRIVATE "TESSERA_PROGRAM=\"$<TARGET_FILE:tessera_program>\""
                                                   "TESSERA_PROBE=\"$<TARGET_FILE:launch_probe>\""
                                                   "TESSERA_TORCH_PYTHON=\"$<$<BOOL:${tessera_torch_python}>:${tessera_torch_python}>\""
                                                   "TESSERA_LAUNCH_TESTS=\"${CMAKE_CURRENT_SOURCE_DIR}/tests/launch\"")
      set_tests_properties(${name} PROPERTIES SKIP_REGULAR_EXPRESSION "\\[  SKIPPED \\]" PROCESSORS 2)
    endif()
    if(layer STREQUAL cli AND starts_program)
      add_dependencies(${target} tessera_program)
      target_compile_definitions(${target} PRIVATE "TESSERA_PROGRAM=\"$<TARGET_FILE:tessera_program>\"")
    endif()
    if(name MATCHES "browser$")  # skipped, and counted, where there is none
      set_tests_properties(${name} PROPERTIES SKIP_REGULAR_EXPRESSION "\\[  SKIPPED \\]")
    endif()
    if(starts_processes OR starts_program OR name MATCHES "^parity.(data_parallel|tensor_parallel|fsdp)$")  # thread ranks mostly wait; processes each load LibTorch first
      set_tests_properties(${name} PROPERTIES PROCESSORS 2)
    endif()
  endif()
endfunction()

if(TARGET tessera_program)
  add_executable(launch_probe tests/launch/probe.cpp)  # a rank for launchers to start
  tessera_test_flags(launch_probe)
  target_link_libraries(launch_probe PRIVATE tessera_train tessera_testing)
  set_target_properties(launch_probe PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
endif()
file(GLOB_RECURSE test_files CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/*_test.cpp)
if(TESSERA_TEST_FILES)
  list(FILTER test_files INCLUDE REGEX "${TESSERA_TEST_FILES}")
endif()
foreach(file ${test_files})
  tessera_add_test(${file})
endforeach()

# Checks of the source and of what was built.
find_program(PYTHON3 python3)
if(PYTHON3)
  set(check_layers ${PYTHON3} ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_layers.py)
  add_test(NAME layers COMMAND ${check_layers} ${CMAKE_CURRENT_SOURCE_DIR}/tessera)
  add_test(NAME layers.planted COMMAND ${check_layers} --expect ${CMAKE_CURRENT_SOURCE_DIR}/tests/layers/planted)
  add_test(NAME public_headers COMMAND ${PYTHON3} ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_public_headers.py)
  add_test(NAME public_headers.planted COMMAND ${PYTHON3} ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_public_headers.py --planted)
  add_test(NAME words COMMAND ${PYTHON3} ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_words.py)
  add_test(NAME words.planted COMMAND ${PYTHON3} ${CMAKE_CURRENT_SOURCE_DIR}/tools/check_words.py --expect)
endif()
set(shipped $<TARGET_FILE:tessera> $<TARGET_FILE:tessera_train>)
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

# Examples run alone and on four ranks, and say the same.
if(TARGET tessera_program)
  set(four_ranks tessera_program run -n 4 --)
else()
  set(four_ranks ${CMAKE_CURRENT_SOURCE_DIR}/examples/run_ranks.sh 4)
endif()
set(example_first_steps_says "c10d_functional.all_reduce: 1")
set(example_data_parallel_says "equal weights, loss fell")
set(example_tensor_parallel_says "loss 2.1210[0-9] to 0.075[0-9]")
set(example_fsdp_says "holds its share.*loss fell")
set(example_two_dimensional_says "loss 4.170[0-9]* to 0.51")
set(example_compile_step_says "the same losses, which fell")
set(example_checkpoint_says "both go on alike")
set(example_own_op_says "the same result and gradient, 0 collectives")
set(example_own_comm_hook_says "equal weights, loss fell")
file(GLOB examples CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/examples/*.cpp)
foreach(example ${examples})
  get_filename_component(name ${example} NAME_WE)
  add_executable(example_${name} ${example})
  tessera_our_code(example_${name})
  target_link_libraries(example_${name} PRIVATE tessera_train)
  if(TESSERA_PCH AND NOT first_example)
    set(first_example example_${name})
    tessera_precompiled(example_${name} PRIVATE <torch/torch.h>)
  elseif(TESSERA_PCH)
    tessera_precompiled(example_${name} REUSE_FROM ${first_example})
  endif()
  add_test(NAME examples.${name} COMMAND example_${name})
  add_test(NAME examples.${name}.4 COMMAND ${four_ranks} $<TARGET_FILE:example_${name}>)
  set_tests_properties(examples.${name} examples.${name}.4 PROPERTIES
                       PASS_REGULAR_EXPRESSION "${example_${name}_says}" TIMEOUT 60
                       ENVIRONMENT "${test_environment}")
endforeach()

# A process with Python's autograd engine in it is refused.
if(tessera_torch_python AND NOT TESSERA_SANITIZE)
  add_library(python_refused_probe SHARED tests/python_refused/probe.cpp)
  tessera_our_code(python_refused_probe)
  target_link_libraries(python_refused_probe PRIVATE tessera)
  add_test(NAME python_refused COMMAND ${tessera_torch_python} ${CMAKE_CURRENT_SOURCE_DIR}/tests/python_refused/run.py
                                       $<TARGET_FILE:python_refused_probe>)
  set_tests_properties(python_refused PROPERTIES SKIP_REGULAR_EXPRESSION "SKIPPED" TIMEOUT 120)
endif()
