# Install and export: find_package(Tessera CONFIG) gives Tessera::tessera, Tessera::train and Tessera::testing.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Tessera)
set(TESSERA_TORCH_HINT ${TESSERA_TORCH_DIR})
configure_package_config_file(cmake/TesseraConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
if(NOT PROJECT_IS_TOP_LEVEL OR TESSERA_SOURCES)  # a part of the library is not installed
  return()
endif()

# LibTorch's folder is part of the run path: the loader does not search a wheel. It is given by name, because
# INSTALL_RPATH_USE_LINK_PATH leaves out folders of the source tree, and .venv is one.
file(RELATIVE_PATH bin_to_lib ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
foreach(target tessera tessera_train tessera_testing)
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN;${TESSERA_TORCH_DIR}/lib")
  install(TARGETS ${target} EXPORT TesseraTargets)
endforeach()
foreach(program tessera_program tessera_bench)
  if(TARGET ${program})
    set_target_properties(${program} PROPERTIES INSTALL_RPATH "$ORIGIN/${bin_to_lib};${TESSERA_TORCH_DIR}/lib")
    install(TARGETS ${program})
  endif()
endforeach()

# Public headers (tools/public_headers.txt), and the detail/ headers that they include, directly or not.
file(STRINGS tools/public_headers.txt to_install REGEX "^tessera/")
set(installed "")
while(to_install)
  list(POP_FRONT to_install header)
  list(APPEND installed ${header})
  get_filename_component(folder ${header} DIRECTORY)
  install(FILES ${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/${folder})
  file(STRINGS ${header} includes REGEX "^#include \"tessera/")
  foreach(include ${includes})
    string(REGEX REPLACE ".*\"(.*)\".*" "\\1" include ${include})
    if(NOT include IN_LIST installed AND NOT include IN_LIST to_install)
      list(APPEND to_install ${include})
    endif()
  endforeach()
endwhile()
install(EXPORT TesseraTargets NAMESPACE Tessera:: DESTINATION ${package_dir})
install(FILES cmake/TesseraLibTorch.cmake ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfig.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake DESTINATION ${package_dir})
