# Runs the portfile without vcpkg, on a build that exists:
#   cmake -DBUILD=build/release -DPREFIX=/clean/prefix -P packaging/vcpkg/run_portfile.cmake
# The functions of vcpkg that the portfile calls are replaced by short ones of the same effect: configure and build do
# nothing, install installs BUILD. So this checks the portfile's commands and the layout of its package, not vcpkg.
cmake_minimum_required(VERSION 3.25)
foreach(name BUILD PREFIX)
  if(NOT DEFINED ${name})
    message(FATAL_ERROR "write -D${name}=...")
  endif()
endforeach()
set(PORT tessera)
get_filename_component(CURRENT_PACKAGES_DIR ${PREFIX} ABSOLUTE)

function(vcpkg_cmake_configure)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "SOURCE_PATH" "OPTIONS")
  if(NOT EXISTS ${arg_SOURCE_PATH}/CMakeLists.txt OR arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "vcpkg_cmake_configure: SOURCE_PATH is '${arg_SOURCE_PATH}', unknown: ${arg_UNPARSED_ARGUMENTS}")
  endif()
  file(STRINGS ${BUILD}/CMakeCache.txt source REGEX "^CMAKE_HOME_DIRECTORY:")
  if(NOT source STREQUAL "CMAKE_HOME_DIRECTORY:INTERNAL=${arg_SOURCE_PATH}")
    message(FATAL_ERROR "${BUILD} is not a build of ${arg_SOURCE_PATH}: ${source}")
  endif()
endfunction()

function(vcpkg_cmake_install)
  execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${CURRENT_PACKAGES_DIR}
                  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# Moves the config to share/, as vcpkg does, and makes its paths one level shorter.
function(vcpkg_cmake_config_fixup)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "PACKAGE_NAME;CONFIG_PATH" "")
  set(to ${CURRENT_PACKAGES_DIR}/share/${arg_PACKAGE_NAME})
  file(MAKE_DIRECTORY ${CURRENT_PACKAGES_DIR}/share)
  file(RENAME ${CURRENT_PACKAGES_DIR}/${arg_CONFIG_PATH} ${to})
  file(GLOB configs ${to}/*.cmake)
  foreach(config ${configs})
    file(READ ${config} text)
    string(REPLACE "\${CMAKE_CURRENT_LIST_DIR}/../../../" "\${CMAKE_CURRENT_LIST_DIR}/../../" text "${text}")
    string(REGEX REPLACE "get_filename_component\\(_IMPORT_PREFIX \"\\\${_IMPORT_PREFIX}\" PATH\\)\n(get_filename_component)"
           "\\1" text "${text}")
    file(WRITE ${config} "${text}")
  endforeach()
endfunction()

function(vcpkg_fixup_pkgconfig)
  if(NOT EXISTS ${CURRENT_PACKAGES_DIR}/lib/pkgconfig/tessera.pc)
    message(FATAL_ERROR "tessera.pc is missing")
  endif()
endfunction()

function(vcpkg_install_copyright)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "FILE_LIST")
  file(INSTALL ${arg_FILE_LIST} DESTINATION ${CURRENT_PACKAGES_DIR}/share/${PORT} RENAME copyright)
endfunction()

file(READ ${CMAKE_CURRENT_LIST_DIR}/ports/tessera/vcpkg.json manifest)
string(JSON port_version GET "${manifest}" version)
file(READ ${CMAKE_CURRENT_LIST_DIR}/../../tessera/version.h header)
string(REGEX MATCHALL "_(MAJOR|MINOR|PATCH) [0-9]+" numbers "${header}")
string(REGEX REPLACE "_[A-Z]+ " "" numbers "${numbers}")
list(JOIN numbers "." version)
if(NOT version STREQUAL port_version)
  message(FATAL_ERROR "vcpkg.json has version ${port_version}, and tessera/version.h has ${version}")
endif()
include(${CMAKE_CURRENT_LIST_DIR}/ports/tessera/portfile.cmake)
