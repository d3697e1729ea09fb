# Finds LibTorch and makes imported targets of our own for it: torch_cpu and c10 only, so that a CUDA wheel on a machine
# without CUDA serves as well (TorchConfig.cmake of such a wheel asks for the CUDA toolkit). Read by our own build and,
# installed, by TesseraConfig.cmake.
#
# Looks at, in this order: TORCH_DIR (CMake, then environment), CMAKE_PREFIX_PATH (likewise), what tools/bootstrap found,
# the LibTorch that an installed Tessera was built with, and the torch of python3.
# Gives: Tessera::torch, TESSERA_TORCH_DIR, TESSERA_TORCH_VERSION.
if(TARGET Tessera::torch)
  return()
endif()
set(TORCH_DIR "" CACHE PATH "LibTorch: the folder that has include/ and lib/")
foreach(given "${TORCH_DIR}" "$ENV{TORCH_DIR}")
  if(given AND NOT EXISTS ${given}/lib/libtorch_cpu.so)
    message(FATAL_ERROR "TORCH_DIR is ${given}, which has no lib/libtorch_cpu.so. "
                        "Give the folder that has include/ and lib/, or nothing to have it looked for.")
  endif()
endforeach()
set(candidates ${TORCH_DIR} $ENV{TORCH_DIR})
string(REPLACE ":" ";" prefixes "${CMAKE_PREFIX_PATH};$ENV{CMAKE_PREFIX_PATH}")
foreach(prefix ${prefixes})  # LibTorch itself, its share/cmake, its share/cmake/Torch
  list(APPEND candidates ${prefix} ${prefix}/../.. ${prefix}/../../..)
endforeach()
set(found_by_bootstrap ${CMAKE_CURRENT_LIST_DIR}/../build/torch_dir)
if(EXISTS ${found_by_bootstrap})
  file(STRINGS ${found_by_bootstrap} line LIMIT_COUNT 1)
  list(APPEND candidates ${line})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${found_by_bootstrap})
endif()
list(APPEND candidates ${TESSERA_TORCH_HINT})

set(TESSERA_TORCH_DIR "")
foreach(candidate ${candidates})
  if(EXISTS ${candidate}/lib/libtorch_cpu.so)
    get_filename_component(TESSERA_TORCH_DIR ${candidate} ABSOLUTE)
    break()
  endif()
endforeach()
if(NOT TESSERA_TORCH_DIR)
  execute_process(
    COMMAND python3 -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(found AND EXISTS ${found}/lib/libtorch_cpu.so)
    set(TESSERA_TORCH_DIR ${found})
  endif()
endif()
if(NOT TESSERA_TORCH_DIR)
  message(FATAL_ERROR "No LibTorch found. Give -DTORCH_DIR=/path/to/libtorch (the folder that has include/ and lib/) "
                      "or CMAKE_PREFIX_PATH, or run tools/bootstrap in Tessera's sources, which installs one.")
endif()

set(version_header ${TESSERA_TORCH_DIR}/include/torch/headeronly/version.h)
if(NOT EXISTS ${version_header})  # before 2.10 or so
  set(version_header ${TESSERA_TORCH_DIR}/include/torch/csrc/api/include/torch/version.h)
endif()
set(TESSERA_TORCH_VERSION "")
if(EXISTS ${version_header})
  file(STRINGS ${version_header} lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
  string(REGEX MATCHALL "[0-9]+" numbers "${lines}")
  list(JOIN numbers "." TESSERA_TORCH_VERSION)
endif()
if(TESSERA_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "LibTorch ${TESSERA_TORCH_VERSION} in ${TESSERA_TORCH_DIR} is too old: Tessera needs 2.11 or "
                      "newer, and is tested with 2.13. Give another -DTORCH_DIR.")
endif()
if(NOT Tessera_FIND_QUIETLY)
  message(STATUS "LibTorch ${TESSERA_TORCH_VERSION}: ${TESSERA_TORCH_DIR}")
endif()

find_package(Threads REQUIRED)
add_library(Tessera::torch INTERFACE IMPORTED GLOBAL)
target_include_directories(Tessera::torch SYSTEM INTERFACE
                           ${TESSERA_TORCH_DIR}/include ${TESSERA_TORCH_DIR}/include/torch/csrc/api/include)
target_link_libraries(Tessera::torch INTERFACE Threads::Threads ${CMAKE_DL_LIBS})
set(torch_libraries torch_cpu c10)
if(TESSERA_CUDA)
  find_package(CUDAToolkit REQUIRED)
  target_link_libraries(Tessera::torch INTERFACE CUDA::cudart CUDA::cublasLt)
  list(APPEND torch_libraries torch_cuda c10_cuda)
endif()
foreach(library ${torch_libraries})
  add_library(Tessera::${library} SHARED IMPORTED GLOBAL)
  set_target_properties(Tessera::${library} PROPERTIES IMPORTED_LOCATION ${TESSERA_TORCH_DIR}/lib/lib${library}.so)
  target_link_libraries(Tessera::torch INTERFACE Tessera::${library})
endforeach()
if(TESSERA_CUDA)  # its kernels register themselves; no symbol of it need be named for that
  target_link_options(Tessera::torch INTERFACE "LINKER:--no-as-needed,${TESSERA_TORCH_DIR}/lib/libtorch_cuda.so,--as-needed")
endif()
