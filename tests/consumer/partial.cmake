# What `cmake --install` does after a partial build. The build is a copy by hard links of the one that exists, without
# some of its files, and its install script with the paths of the copy.
#   nothing        an error, and an empty prefix
#   library        Tessera::tessera alone: a consumer configures; one that needs Tessera::train is refused, with the reason
#   no benches     everything else
set(shadow ${work}/partial)

function(install_partial name)  # further arguments: files that are built
  set(build ${shadow}/${name})
  file(MAKE_DIRECTORY ${build})
  foreach(file ${ARGN})
    get_filename_component(folder ${build}/${file} DIRECTORY)
    file(MAKE_DIRECTORY ${folder})
    file(CREATE_LINK ${BUILD}/${file} ${build}/${file} COPY_ON_ERROR)
  endforeach()
  foreach(entry TesseraConfig.cmake TesseraConfigVersion.cmake tessera.pc tessera-train.pc tessera-use-torch)
    file(CREATE_LINK ${BUILD}/${entry} ${build}/${entry} COPY_ON_ERROR)
  endforeach()
  file(CREATE_LINK ${BUILD}/CMakeFiles ${build}/CMakeFiles SYMBOLIC)
  file(STRINGS ${BUILD}/cmake_install.cmake lines)
  set(script "")
  foreach(line IN LISTS lines)
    if(NOT line MATCHES "RPATH")  # the libraries have the run path of the real build
      string(REPLACE "${BUILD}/" "${build}/" line "${line}")
    endif()
    string(APPEND script "${line}\n")
  endforeach()
  file(WRITE ${build}/cmake_install.cmake "${script}")
  execute_process(COMMAND ${CMAKE_COMMAND} -DCMAKE_INSTALL_PREFIX=${build}/prefix -P ${build}/cmake_install.cmake
                  OUTPUT_VARIABLE out ERROR_VARIABLE out RESULT_VARIABLE rc)
  set(out "${out}" PARENT_SCOPE)
  set(rc "${rc}" PARENT_SCOPE)
endfunction()

function(expect condition what)
  cmake_language(EVAL CODE "if(${condition})\nset(holds TRUE)\nendif()")
  if(NOT holds)
    message(FATAL_ERROR "partial install: ${what}\nexit code ${rc}\n${out}")
  endif()
endfunction()

file(GLOB library RELATIVE ${BUILD} ${BUILD}/lib/libtessera.so*)
file(GLOB train RELATIVE ${BUILD} ${BUILD}/lib/libtessera_train.so*)

install_partial(nothing)
expect("NOT rc EQUAL 0" "a build without the library was installed")
expect("out MATCHES \"--target tessera\"" "the error does not say what to build")
expect("NOT EXISTS \${shadow}/nothing/prefix" "something was installed before the error")

install_partial(library ${library})
expect("rc EQUAL 0" "the library alone is not installed")
expect("out MATCHES \"not installed: libtessera_train\"" "the missing library is not named")
expect("NOT EXISTS \${shadow}/library/prefix/lib/pkgconfig/tessera-train.pc" "there is a file of what was not built")
step(${CMAKE_COMMAND} ${flags} -B ${shadow}/library/consumer -DCMAKE_PREFIX_PATH=${shadow}/library/prefix)
execute_process(COMMAND ${CMAKE_COMMAND} ${flags} -B ${shadow}/library/train -DCMAKE_PREFIX_PATH=${shadow}/library/prefix
                        -DCOMPONENTS=train
                OUTPUT_VARIABLE out ERROR_VARIABLE out RESULT_VARIABLE rc)
expect("NOT rc EQUAL 0" "the consumer got a Tessera::train that does not exist")
expect("out MATCHES \"partial[ \n]+build\"" "the error does not give the reason")

if(EXISTS ${BUILD}/bin/tessera)
  install_partial(no_benches ${library} ${train} bin/tessera)
  expect("rc EQUAL 0" "a build without benches is not installed")
  expect("out MATCHES \"not installed: tessera-bench\"" "the missing benches are not named")
  step(${shadow}/no_benches/prefix/bin/tessera --version)
endif()

# A program without CMake.
find_program(PKG_CONFIG pkg-config)
if(PKG_CONFIG)
  set(ENV{PKG_CONFIG_PATH} ${shadow}/library/prefix/lib/pkgconfig)
  execute_process(COMMAND ${PKG_CONFIG} --cflags --libs tessera OUTPUT_VARIABLE pc_flags COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(pc_flags UNIX_COMMAND "${pc_flags}")
  step(${COMPILER} -std=c++20 ${SOURCE}/tests/consumer/main.cpp -o ${shadow}/with_pkg_config ${pc_flags})
  run_consumer(${shadow}/with_pkg_config)
endif()
