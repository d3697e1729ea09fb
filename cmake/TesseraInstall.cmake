# Install and export: find_package(Tessera CONFIG) gives Tessera::tessera.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Tessera)
set(TESSERA_TORCH_HINT ${TESSERA_TORCH_DIR})
configure_package_config_file(cmake/TesseraConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
if(NOT PROJECT_IS_TOP_LEVEL)
  return()
endif()

# LibTorch's own folder goes into the run path too: a wheel is in no place that the loader knows. By name, since
# INSTALL_RPATH_USE_LINK_PATH leaves out folders of the source tree, and .venv is one.
set_target_properties(tessera PROPERTIES INSTALL_RPATH ${TESSERA_TORCH_DIR}/lib)
install(TARGETS tessera EXPORT TesseraTargets)
if(TARGET tessera_program)
  file(RELATIVE_PATH bin_to_lib ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
  foreach(program tessera_program tessera_bench)
    if(TARGET ${program})
      set_target_properties(${program} PROPERTIES INSTALL_RPATH "$ORIGIN/${bin_to_lib};${TESSERA_TORCH_DIR}/lib")
      install(TARGETS ${program})
    endif()
  endforeach()
endif()
install(DIRECTORY tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h"
        PATTERN "cli" EXCLUDE PATTERN "gloo_stub" EXCLUDE)
install(EXPORT TesseraTargets NAMESPACE Tessera:: DESTINATION ${package_dir})
install(FILES cmake/TesseraLibTorch.cmake ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfig.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake DESTINATION ${package_dir})
