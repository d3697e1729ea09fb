# How our code is compiled. A project that takes us in by FetchContent keeps its own compiler launcher and linker.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)

function(tessera_our_code target)
  target_compile_options(${target} PRIVATE -Wall -Wextra)
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)  # g++ 12 sees ghosts in copies of c10::SmallVector
    target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized)
    if(CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)  # and later ones in every accessor of a handle
      target_compile_options(${target} PRIVATE -Wno-dangling-reference)
    endif()
  endif()
  if(TESSERA_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)  # collects garbage only above 1 GB: a sixth less time for a file with LibTorch
    target_compile_options(${target} PRIVATE "SHELL:--param ggc-min-heapsize=1000000" "SHELL:--param ggc-min-expand=200")
  endif()
endfunction()

# Further arguments: PRIVATE and headers, or REUSE_FROM and a target. LibTorch's headers are most of what a file costs.
function(tessera_precompiled target)
  if(NOT TESSERA_PCH)
    return()
  endif()
  target_precompile_headers(${target} ${ARGN})
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    # The first is for ccache. The others: g++ 12 does not treat a precompiled header as a system header, and reports
    # false positives in the standard library's strings. Builds without precompiled headers see the real ones.
    target_compile_options(${target} PRIVATE -fpch-preprocess -Wno-array-bounds -Wno-restrict -Wno-stringop-overflow
                                             -Wno-stringop-overread -Wno-free-nonheap-object)
  endif()
endfunction()

# Compiles the files of a layer together, and small layers with the next one, at most `TESSERA_UNITY_BYTES` of source per
# translation unit. Headers are then parsed, and templates instantiated, once per unit instead of once per file.
set(TESSERA_UNITY_BYTES 120000 CACHE STRING "Source bytes per translation unit of a unity build")
set(TESSERA_SINGLE_FILES "" CACHE STRING "In a unity build, compile sources whose paths match this expression one by one")
mark_as_advanced(TESSERA_UNITY_BYTES TESSERA_SINGLE_FILES)
function(tessera_unity target)  # optional argument: bytes per unit of this target
  set(most ${TESSERA_UNITY_BYTES})
  if(ARGN)
    set(most ${ARGN})
  endif()
  if(NOT TESSERA_UNITY)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)  # it takes the files of a unit for headers
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cpp$")
  set(layer_before "")
  set(bytes 0)
  set(number 0)
  foreach(source ${sources})
    file(RELATIVE_PATH path ${CMAKE_CURRENT_SOURCE_DIR} ${source})
    string(REGEX REPLACE "^((tessera|tests)/)?([^/]+)/.*" "\\3" layer ${path})
    if(TESSERA_SINGLE_FILES AND source MATCHES "${TESSERA_SINGLE_FILES}")
      set_source_files_properties(${source} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
      if(path MATCHES "^tests/")  # a new test alone leaves the units of the others as they are
        continue()
      endif()
    endif()
    file(SIZE ${source} size)
    math(EXPR bytes "${bytes} + ${size}")
    # A unit ends at its limit, and at the end of a layer if it is not small.
    math(EXPR before "${bytes} - ${size}")
    if(number EQUAL 0 OR bytes GREATER most OR (NOT layer STREQUAL layer_before AND before GREATER 30000))
      math(EXPR number "${number} + 1")
      set(bytes ${size})
      set(name ${layer}_${number})
    endif()
    set(layer_before ${layer})
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${name})
  endforeach()
endfunction()

if(NOT PROJECT_IS_TOP_LEVEL)
  return()
endif()
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)

find_program(CCACHE ccache)
if(CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # ccache needs this to accept precompiled headers: __TIME__ and macros defined before them may differ.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${CCACHE})
endif()
include(CheckLinkerFlag)
check_linker_flag(CXX -fuse-ld=mold TESSERA_HAS_MOLD)
if(TESSERA_HAS_MOLD)
  add_link_options(-fuse-ld=mold)
endif()

if(TESSERA_SANITIZE)
  # vptr asks for type information of LibTorch's classes, which it does not have.
  add_compile_options(-fsanitize=${TESSERA_SANITIZE} -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${TESSERA_SANITIZE})
  if(TESSERA_SANITIZE MATCHES undefined)
    add_compile_options(-fno-sanitize=vptr -fno-sanitize-recover=undefined)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    # g++ warns of more than there is in instrumented code; the other builds see the real ones.
    add_compile_options(-Wno-maybe-uninitialized -Wno-stringop-overflow)
  endif()
  if(TESSERA_SANITIZE MATCHES thread AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    add_compile_options(-Wno-tsan)  # "atomic_thread_fence is not supported": in LibTorch's headers
  endif()
endif()
