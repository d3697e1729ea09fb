# An overlay port of this checkout:  vcpkg install tessera --overlay-ports=packaging/vcpkg/ports
# LibTorch is not a port with distributed support: name its folder in the environment variable TORCH_DIR, and keep it
# through vcpkg's clean environment with VCPKG_KEEP_ENV_VARS=TORCH_DIR.
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../../.." ABSOLUTE)
set(VCPKG_BUILD_TYPE release)  # LibTorch has no debug build
set(VCPKG_POLICY_ALLOW_EXES_IN_BIN enabled)  # the program finds its libraries relative to bin/

vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS -DTESSERA_TESTS=OFF -DTESSERA_WERROR=OFF "-DTORCH_DIR=$ENV{TORCH_DIR}"
)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(PACKAGE_NAME Tessera CONFIG_PATH lib/cmake/Tessera)
vcpkg_fixup_pkgconfig()
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
