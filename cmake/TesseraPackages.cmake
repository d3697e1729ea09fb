# CPack: a .deb and a .tar.gz of what is built (`make packages`). Neither has LibTorch in it, nor paths of this machine:
# the user runs tessera-use-torch once, and the .deb does it where python3 has a torch.
if(NOT PROJECT_IS_TOP_LEVEL OR TESSERA_SOURCES)
  return()
endif()
set(CPACK_PACKAGE_NAME tessera)
set(CPACK_PACKAGE_VENDOR Tessera)
set(CPACK_PACKAGE_CONTACT "The Tessera developers <tessera@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Distributed tensors and SPMD training for LibTorch in C++")
set(CPACK_PACKAGE_DESCRIPTION "Libraries, headers and the program tessera. Needs LibTorch ${TESSERA_TORCH_VERSION}, which
is not a Debian package: run tessera-use-torch after you have installed it.")
set(CPACK_RESOURCE_FILE_LICENSE ${CMAKE_CURRENT_SOURCE_DIR}/LICENSE)
set(CPACK_GENERATOR TGZ DEB)
set(CPACK_INCLUDE_TOPLEVEL_DIRECTORY ON)
set(CPACK_STRIP_FILES ON)
set(CPACK_THREADS 1)
set(CPACK_PRE_BUILD_SCRIPTS ${CMAKE_CURRENT_SOURCE_DIR}/packaging/remove_build_paths.cmake)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_PACKAGE_DEPENDS "libc6, libstdc++6 (>= 12), libgcc-s1")  # dpkg-shlibdeps does not know LibTorch
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "g++, cmake, pkg-config")
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA ${CMAKE_CURRENT_SOURCE_DIR}/packaging/deb/postinst
                                       ${CMAKE_CURRENT_SOURCE_DIR}/packaging/deb/prerm)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
include(CPack)
