# Everything here is a CMake preset (CMakePresets.json) with the bootstrap before it; both work without make too.
#   make test     bootstrap, configure, build, test          make J=8 test     with eight jobs instead of two
#   make asan | tsan | clang     the same with sanitizers (tsan: comm only) or clang++ 14, in their own build folders
J ?= 2
GENERATOR = $(if $(shell command -v ninja),,-G "Unix Makefiles")
CTEST = ctest -j$(J) --preset

.DEFAULT_GOAL := build
.PHONY: bootstrap build test debug asan tsan clang cuda soak bench install format format-check tidy clean

test: build
	@$(CTEST) release
build: build-release
soak: build
	@$(CTEST) soak
debug asan tsan clang cuda: %: build-%
	@$(CTEST) $@
bench: build
	@for name in $$(build/release/bin/tessera bench --list); do build/release/bin/tessera bench $$name --peer; done
PREFIX ?= /usr/local
install: build
	@cmake --install build/release --prefix $(PREFIX)

build-%: bootstrap
	@[ -e build/$*/build.ninja ] || [ -e build/$*/Makefile ] || cmake --preset $* $(GENERATOR)
	@cmake --build --preset $* -j$(J)
bootstrap:
	@tools/bootstrap
build-clang: bootstrap-clang
bootstrap-%:
	@tools/bootstrap $*

SOURCES = $(shell git ls-files '*.h' '*.cpp' '*.cu')
format: bootstrap-format
	@clang-format -i $(SOURCES)
format-check: bootstrap-format
	@clang-format --dry-run -Werror $(SOURCES)
tidy: build
	@clang-tidy -p build/release --quiet $(filter tessera/%.cpp,$(SOURCES))
clean:
	@rm -rf build
