# Installs the build, then builds and runs the consumer against it; partial.cmake installs parts of it. Then builds and runs it with FetchContent, with only
# the sources that the consumer needs, because all sources would double the build time.
set(work ${BUILD}/consumer)
file(REMOVE_RECURSE ${work})

function(step)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE out ERROR_VARIABLE out RESULT_VARIABLE rc)
  if(NOT rc EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\n${out}")
  endif()
  set(out "${out}" PARENT_SCOPE)
endfunction()

function(run_consumer program)
  step(${program})
  if(NOT out MATCHES "consumer ran with Tessera [0-9.]+: .*'sun'")
    message(FATAL_ERROR "the consumer printed: ${out}")
  endif()
  message(STATUS "${out}")
endfunction()

set(flags -G ${GENERATOR} -S ${SOURCE}/tests/consumer -DCMAKE_CXX_COMPILER=${COMPILER}
          -DCMAKE_BUILD_TYPE=${BUILD_TYPE} "-DCMAKE_CXX_FLAGS_RELEASE=${FLAGS_RELEASE}"
          "-DCMAKE_CXX_FLAGS_DEBUG=${FLAGS_DEBUG}")
if(MOLD)
  list(APPEND flags -DCMAKE_EXE_LINKER_FLAGS=-fuse-ld=mold -DCMAKE_SHARED_LINKER_FLAGS=-fuse-ld=mold)
endif()
unset(ENV{TORCH_DIR})  # the installed package has the path of its LibTorch

step(${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/prefix)
step(${CMAKE_COMMAND} ${flags} -B ${work}/installed -DCMAKE_PREFIX_PATH=${work}/prefix)
step(${CMAKE_COMMAND} --build ${work}/installed)
run_consumer(${work}/installed/consumer)
if(EXISTS ${work}/prefix/bin/tessera)
  step(${work}/prefix/bin/tessera --version)
endif()

include(${CMAKE_CURRENT_LIST_DIR}/partial.cmake)

step(${CMAKE_COMMAND} ${flags} -B ${work}/fetched -DFETCH_FROM=${SOURCE} -DTORCH_DIR=${TORCH} -DTESSERA_WERROR=ON
     -DTESSERA_PCH=OFF -DTESSERA_SOURCES=/tessera/base/)
step(${CMAKE_COMMAND} --build ${work}/fetched -j2)
run_consumer(${work}/fetched/consumer)
file(REMOVE_RECURSE ${work})
