# The three libraries. Each takes the .cpp files of its layers (folders of tessera/):
#   Tessera::tessera   distributed tensors, parallelism, compiler, checkpoints
#   Tessera::train     trainer, data sets, models, launcher
#   Tessera::testing   ranks as threads or processes, the rule oracle, and other helpers for tests

function(tessera_sources_of layers)  # -> sources
  set(sources "")
  foreach(layer ${layers})
    file(GLOB_RECURSE files CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tessera/${layer}/*.cpp)
    list(APPEND sources ${files})
  endforeach()
  if(TESSERA_SOURCES)
    list(FILTER sources INCLUDE REGEX "${TESSERA_SOURCES}")
  endif()
  # A file no_X.cpp replaces X.cpp where X is not available, so that no function needs an #ifdef.
  if(TESSERA_CUDA)
    list(FILTER sources EXCLUDE REGEX "/no_(nccl|cuda)\\.cpp$")
  else()
    list(FILTER sources EXCLUDE REGEX "/(nccl|cuda)\\.cpp$")
  endif()
  set(sources "${sources}" PARENT_SCOPE)
endfunction()

# HEADERS are precompiled; a library of a few translation units needs none. SETUP_LAYERS run once per module or per program:
# they are compiled with -Og, which takes two thirds of the time of -O2.
function(tessera_library target)
  cmake_parse_arguments(arg "" "TYPE" "LAYERS;HEADERS;SETUP_LAYERS;LINKS" ${ARGN})
  tessera_sources_of("${arg_LAYERS}")
  if(NOT sources)  # TESSERA_SOURCES selects nothing of this library
    return()
  endif()
  add_library(${target} ${arg_TYPE} ${sources})
  tessera_our_code(${target})
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}>
                                              $<INSTALL_INTERFACE:include>)
  target_link_libraries(${target} PUBLIC ${arg_LINKS})
  set_target_properties(${target} PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${version_MAJOR}.${version_MINOR}
                                             POSITION_INDEPENDENT_CODE ON)
  if(arg_HEADERS)
    tessera_precompiled(${target} PRIVATE ${arg_HEADERS})
  endif()
  tessera_unity(${target})
  tessera_sources_of("${arg_SETUP_LAYERS}")
  if(sources)
    add_library(${target}_setup OBJECT ${sources})
    tessera_our_code(${target}_setup)
    target_compile_options(${target}_setup PRIVATE $<$<CONFIG:Release>:-Og>)
    target_include_directories(${target}_setup PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
    target_link_libraries(${target}_setup PRIVATE ${arg_LINKS})
    set_target_properties(${target}_setup PROPERTIES POSITION_INDEPENDENT_CODE ON)
    tessera_precompiled(${target}_setup PRIVATE ${arg_HEADERS})  # its own: g++ crashes on one of another -O
    tessera_unity(${target}_setup)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_setup>)
  endif()
  string(REGEX REPLACE "^tessera_" "" name ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  add_library(Tessera::${name} ALIAS ${target})
endfunction()

# For targets whose time is spent in LibTorch: compiled as SETUP_LAYERS, with their precompiled header.
function(tessera_setup_code target)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-Og>)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON DEFINE_SYMBOL "")
  if(TARGET tessera_setup)
    tessera_precompiled(${target} REUSE_FROM tessera_setup)
  endif()
endfunction()

# Files with compile options of their own. They are compiled alone, without the precompiled header.
#   gloo.cpp        LibTorch ships no gloo headers; stand-ins declare what this one file needs
#   random_ops.cpp  a fused multiply-add would change random bits on processors that have one; without errno and
#                   floating-point flags sqrt and selects are vectorised (normal_: 12 -> 5.6 ns per element)
#   reduce, widen   sums over ranks: short loops that pay for vectorising
#   row_kernels     loops without fused multiply-add, whose bits would depend on the processor
#   cpu_kernels_*   the same source for several kinds of processors; cpu_kernels.cpp selects one when the program runs
#   hookable.cpp    one instantiation per class of torch::nn
set(file_gloo tessera/comm/backends/gloo.cpp)
set(file_random_ops tessera/dtensor/detail/random_ops.cpp)
set(files_sums tessera/comm/detail/region/reduce.cpp tessera/comm/detail/region/widen.cpp)
set_source_files_properties(${file_gloo} PROPERTIES INCLUDE_DIRECTORIES
                            ${CMAKE_CURRENT_SOURCE_DIR}/tessera/comm/detail/gloo_stub)
set_source_files_properties(${file_random_ops} PROPERTIES COMPILE_OPTIONS
                            "-ffp-contract=off;-fno-math-errno;-fno-trapping-math")
set_source_files_properties(${files_sums} PROPERTIES COMPILE_OPTIONS "-O3;-fno-trapping-math")
set(file_row_kernels tessera/numerics/detail/row_kernels.cpp)
set_source_files_properties(${file_row_kernels} PROPERTIES COMPILE_OPTIONS
                            "-O3;-ffp-contract=off;-fno-math-errno;-fno-trapping-math")
set_source_files_properties(${file_gloo} ${file_random_ops} ${files_sums} ${file_row_kernels} PROPERTIES
                            SKIP_PRECOMPILE_HEADERS ON SKIP_UNITY_BUILD_INCLUSION ON)
foreach(processor avx512_bf16 avx512 avx2 baseline)
  set(file tessera/numerics/detail/vector/cpu_kernels_${processor}.cpp)
  set(options -O3 -ffp-contract=fast -fno-math-errno -fno-trapping-math -Wno-psabi)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND processor MATCHES avx512)
    list(APPEND options -mavx512f -mavx512vl -mavx512dq -mfma -mprefer-vector-width=512)
    if(processor STREQUAL avx512_bf16)
      list(APPEND options -mavx512bw -mavx512bf16)
    endif()
  elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND processor STREQUAL avx2)
    list(APPEND options -mavx2 -mfma)
  endif()
  set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "${options}" SKIP_PRECOMPILE_HEADERS ON
                              SKIP_UNITY_BUILD_INCLUSION ON)
endforeach()
set_source_files_properties(tessera/nn/detail/hookable.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)

tessera_library(tessera TYPE SHARED
  LAYERS base tracing comm cuda mesh placement rules redistribute propagate dtensor data_parallel optim compile numerics
  HEADERS <ATen/core/Tensor.h> <ATen/core/dispatch/Dispatcher.h> <torch/csrc/autograd/function.h>
          <torch/csrc/distributed/c10d/ProcessGroup.hpp> <torch/library.h>
  SETUP_LAYERS nn state tensor_parallel checkpoint debug pipelining
  LINKS Tessera::torch)
include(TesseraSourceText)
tessera_source_text(tessera tessera/dtensor/detail/philox.h tessera/dtensor/detail/distributions.h)
tessera_library(tessera_train TYPE SHARED
  LAYERS data models launch train
  LINKS tessera)
tessera_library(tessera_testing TYPE STATIC
  LAYERS testing
  LINKS tessera)
foreach(target tessera_train tessera_testing)
  if(TARGET ${target})
    tessera_setup_code(${target})
  endif()
endforeach()
