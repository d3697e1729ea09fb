# Install and export: find_package(Tessera CONFIG) gives Tessera::tessera, and Tessera::train and Tessera::testing if they
# were built. A partial build installs what it has; only the library Tessera::tessera is required. pkg-config: `tessera`
# and `tessera-train`. Packages are made from the same rules (TesseraPackages.cmake).
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

# What is missing is known before the first file is copied, so that no prefix is left half filled.
install(CODE "
  if(NOT EXISTS \"$<TARGET_FILE:tessera>\")
    message(FATAL_ERROR \"Nothing is installed: the library is not built. \"
                        \"Build it first:  cmake --build ${CMAKE_BINARY_DIR} --target tessera\")
  endif()")
function(tessera_say_if_missing target)
  install(CODE "
    if(NOT EXISTS \"$<TARGET_FILE:${target}>\")
      message(STATUS \"Not built, so not installed: $<TARGET_FILE_NAME:${target}> (target ${target})\")
    endif()")
endfunction()

# LibTorch is found by the run path, because the loader does not search a wheel: first the link that the script
# tessera-use-torch makes, then the folder that this build used. That one is given by name, because
# INSTALL_RPATH_USE_LINK_PATH leaves out folders of the source tree, and .venv is one.
file(RELATIVE_PATH bin_to_lib ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
foreach(target tessera tessera_train tessera_testing)
  string(REPLACE "tessera_" "" part ${target})
  set(export Tessera_${part})
  set_target_properties(${target} PROPERTIES
                        INSTALL_RPATH "$ORIGIN;$ORIGIN/tessera/torch/lib;${TESSERA_TORCH_DIR}/lib")
  if(NOT target STREQUAL tessera)
    tessera_say_if_missing(${target})
  endif()
  install(TARGETS ${target} EXPORT ${export} LIBRARY OPTIONAL ARCHIVE OPTIONAL)
  install(EXPORT ${export} NAMESPACE Tessera:: DESTINATION ${package_dir})
endforeach()
foreach(program tessera_program tessera_bench)
  if(TARGET ${program})
    set_target_properties(${program} PROPERTIES INSTALL_RPATH
      "$ORIGIN/${bin_to_lib};$ORIGIN/${bin_to_lib}/tessera/torch/lib;${TESSERA_TORCH_DIR}/lib")
    tessera_say_if_missing(${program})
    install(TARGETS ${program} RUNTIME OPTIONAL)
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
install(FILES cmake/TesseraLibTorch.cmake ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfig.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake DESTINATION ${package_dir})

# pkg-config. torch_dir can be changed:  pkg-config --define-variable=torch_dir=/path --cflags --libs tessera
file(RELATIVE_PATH pc_to_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
set(torch_flags "")
foreach(library ${torch_libraries})
  string(APPEND torch_flags " -l${library}")
endforeach()
configure_file(cmake/tessera.pc.in ${CMAKE_CURRENT_BINARY_DIR}/tessera.pc @ONLY)
configure_file(cmake/tessera-train.pc.in ${CMAKE_CURRENT_BINARY_DIR}/tessera-train.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/tessera.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(CODE "
  if(EXISTS \"$<TARGET_FILE:tessera_train>\")
    file(INSTALL \"${CMAKE_CURRENT_BINARY_DIR}/tessera-train.pc\"
         DESTINATION \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/pkgconfig\")
  endif()")
configure_file(packaging/tessera-use-torch.in ${CMAKE_CURRENT_BINARY_DIR}/tessera-use-torch @ONLY)
install(PROGRAMS ${CMAKE_CURRENT_BINARY_DIR}/tessera-use-torch DESTINATION ${CMAKE_INSTALL_BINDIR})
file(CONFIGURE OUTPUT torch_dir CONTENT "@TESSERA_TORCH_DIR@\n" @ONLY)  # for the scripts of packaging/
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
