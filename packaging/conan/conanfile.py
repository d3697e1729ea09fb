"""Conan 2:  conan create packaging/conan -o tessera/*:torch_dir=/path/to/libtorch
With a build that exists:  conan export-pkg packaging/conan -o tessera/*:build_dir=build/release

LibTorch is not a requirement of the recipe, because Conan Center's has no distributed package: name its folder."""
import os
import re

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeToolchain
from conan.tools.files import copy, load


class TesseraRecipe(ConanFile):
    name = "tessera"
    license = "BSD-3-Clause"
    description = "Distributed tensors and SPMD training for LibTorch in C++"
    topics = ("libtorch", "distributed", "training")
    package_type = "shared-library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"torch_dir": ["ANY"], "build_dir": ["ANY"], "cuda": [True, False]}
    default_options = {"torch_dir": "", "build_dir": "", "cuda": False}

    @property
    def _root(self):
        return os.path.join(self.recipe_folder, "..", "..")

    def set_version(self):
        text = load(self, os.path.join(self._root, "tessera/version.h"))
        self.version = ".".join(re.search(rf"VERSION_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH"))

    def export_sources(self):
        for folder in ("cmake", "packaging", "tessera", "tools"):
            copy(self, f"{folder}/*", self._root, self.export_sources_folder)
        for file in ("CMakeLists.txt", "LICENSE"):
            copy(self, file, self._root, self.export_sources_folder)

    def package_id(self):
        del self.info.options.torch_dir
        del self.info.options.build_dir

    def validate(self):
        check_min_cppstd(self, 20)
        if self.settings.os != "Linux":
            raise ConanInvalidConfiguration("Tessera runs on Linux")

    def generate(self):
        if self.options.build_dir:
            return
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["TORCH_DIR"] = str(self.options.torch_dir)
        toolchain.cache_variables["TESSERA_CUDA"] = bool(self.options.cuda)
        toolchain.cache_variables["TESSERA_TESTS"] = False
        toolchain.generate()

    def build(self):
        if self.options.build_dir:
            return
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        build = str(self.options.build_dir) or self.build_folder
        self.run(f'cmake --install "{os.path.abspath(build)}" --prefix "{self.package_folder}"')

    def package_info(self):
        self.cpp_info.set_property("cmake_find_mode", "none")  # lib/cmake/Tessera has the config
        self.cpp_info.builddirs = ["lib/cmake/Tessera"]
        self.cpp_info.libs = ["tessera"]
        self.buildenv_info.prepend_path("PATH", os.path.join(self.package_folder, "bin"))
        self.runenv_info.prepend_path("PATH", os.path.join(self.package_folder, "bin"))
