# Everything here is a CMake preset (CMakePresets.json) with the bootstrap before it; both work without make too.
#   make train    bootstrap, build the program, train a small GPT on sums with four ranks, check that it learned them
#   make test     bootstrap, configure, build, test          make J=8 test     with eight jobs instead of two
#   make asan | tsan | clang     the same with sanitizers (tsan: comm only) or clang++ 14, in their own build folders
J ?= 2
GENERATOR = $(if $(shell command -v ninja),,-G "Unix Makefiles")
CTEST = ctest -j$(J) --preset

.DEFAULT_GOAL := build
.PHONY: bootstrap build program train test debug asan tsan clang cuda soak bench install format format-check tidy clean

test: build
	@$(CTEST) release
# Sums of two numbers: about a minute of two cores. Held-out sums tell learning from memorising.
TRAIN ?= --mesh dp=2,tp=2 --data arithmetic --layers 2 --batch 128 --steps 1000 --lr 2e-3 \
         --schedule wsd --optimizer.decay_share 0.3 --weight-decay 0.01 --log-every 50 --eval-every 100 --accuracy 0.95
train: program
	@build/release/bin/tessera train $(TRAIN)
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

configured = [ -e build/$(1)/build.ninja ] || [ -e build/$(1)/Makefile ] || cmake --preset $(1) $(GENERATOR)
build-%: bootstrap
	@$(call configured,$*)
	@cmake --build --preset $* -j$(J)
program:
	@tools/bootstrap program
	@$(call configured,release)
	@NINJA_STATUS='build %p  ' cmake --build --preset release -j$(J) --target tessera_program
bootstrap:
	@tools/bootstrap program tests
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
