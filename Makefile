# Every target is a CMake preset (CMakePresets.json) with tools/bootstrap before it; both work without make, too.
#   make train     build the program, train a small GPT on sums with four ranks, check that it learned them
#   make test      build everything, run every test                   make J=8 test   with eight jobs instead of two
#   make dev       development build, file by file; T=rules builds and runs the tests of one layer
#   make nightly   what is too long for each change: single files, clang, sanitizers, clang-tidy, header by header
J ?= 2
GENERATOR = $(if $(shell command -v ninja),,-G "Unix Makefiles")
CTEST = ctest -j$(J) --preset

.DEFAULT_GOAL := build
.PHONY: bootstrap build program train test dev debug asan tsan sanitize fuzz clang cuda soak bench install packages docs check format \
        format-check parity-ops parity-refresh tidy headers nightly clean

test: build
	@$(CTEST) release
# Sums of two numbers: about a minute on two cores. Validation sums show that it generalises.
TRAIN ?= --mesh dp=2,tp=2 --data arithmetic --layers 2 --batch 128 --steps 1000 --lr 2e-3 \
         --schedule wsd --optimizer.decay_share 0.3 --weight-decay 0.01 --log-every 50 --eval-every 100 --accuracy 0.95
train: program
	@build/release/bin/tessera train $(TRAIN)
build: build-release
soak: build
	@$(CTEST) soak
	@$(MAKE) --no-print-directory parity-ops
	@$(MAKE) --no-print-directory fuzz FUZZ=120
# PyTorch's operator database on distributed tensors. parity-refresh writes the samples that `make test` runs: two per entry,
# and one of each other dtype. parity-ops dumps SAMPLES of each and runs them in every combination.
SAMPLES ?= 40
parity-refresh: bootstrap
	@.venv/bin/python tests/parity/op_db.py tests/parity/op_db 2 1
	@.venv/bin/python tests/parity/op_bytes.py tests/parity/op_db
parity-ops: build
	@mkdir -p build/op_db && .venv/bin/python tests/parity/op_db.py build/op_db $(SAMPLES) $(SAMPLES)
	@.venv/bin/python tests/parity/op_bytes.py build/op_db
	@TESSERA_OP_DB=build/op_db build/release/tests/test_parity --gtest_filter='OpDb.*:OpBytes.*'
# Fuzzers of the parsers, FUZZ seconds each: libFuzzer under the address and undefined-behaviour sanitizers.
FUZZ ?= 600
fuzz: build bootstrap-fuzz
	@$(call configured,fuzz)
	@cmake --build --preset fuzz -j$(J)
	@tools/run_fuzzers $(FUZZ) $(J)
debug asan tsan clang cuda: %: build-%
	@$(CTEST) $@
bench: build
	@for name in $$(build/release/bin/tessera bench --list); do build/release/bin/tessera bench $$name --peer; done
PREFIX ?= /usr/local
install: build
	@cmake --install build/release --prefix $(PREFIX)

# Makes the packages of what is built and tests each in a clean prefix; packaging/README.md.
packages: build bootstrap-packages
	@for package in archive deb wheel conan vcpkg; do CONAN=$(CURDIR)/build/conan/bin/conan packaging/test_$$package || exit 1; done

# The documentation site, without network: build/docs/site/index.html. A browser, where there is one, opens it and searches.
docs: program bootstrap-docs
	@python3 tools/build_docs.py && tools/check_docs_site build/docs/site

# One translation unit per file: a change costs one file. T names a layer: make dev T=rules
T ?=
dev: bootstrap
	@$(call configured,dev)
	@cmake --build --preset dev -j$(J) $(if $(T),--target tests.$(T))
	@$(CTEST) dev $(if $(T),-R '^$(T)\.')

# Address sanitizer on the pure layers and dtensor, thread sanitizer on comm: the part of the sanitizers that CI runs. The
# tests that are left out are the longest; `make nightly` runs them.
sanitize: build-asan-fast build-tsan
	@$(CTEST) asan-fast -E '^dtensor\.(random|train)$$'
	@$(CTEST) tsan -E '^comm\.gloo$$'

nightly: check headers
	@cmake -E rm -rf build/dev
	@$(MAKE) --no-print-directory dev clang asan tsan soak tidy

configured = [ -e build/$(1)/build.ninja ] || [ -e build/$(1)/Makefile ] || cmake --preset $(1) $(GENERATOR)
build-%: bootstrap
	@$(call configured,$*)
	@cmake --build --preset $* -j$(J)
program:
	@tools/bootstrap program
	@$(call configured,release)
	@NINJA_STATUS='build %p  ' cmake --build --preset release -j$(J) --target tessera_program
bootstrap:
	@tools/bootstrap program tests parity
build-clang: bootstrap-clang
bootstrap-%:
	@tools/bootstrap $*

SOURCES = $(shell git ls-files '*.h' '*.cpp' '*.cu')
check:  # the checks that need no build
	@python3 tools/check_layers.py tessera
	@python3 tools/check_words.py
	@python3 tools/check_public_headers.py
	@python3 tools/check_examples.py
	@python3 tools/check_links.py
format: bootstrap-format
	@clang-format -i $(SOURCES)
format-check: bootstrap-format
	@clang-format --dry-run -Werror $(SOURCES)
headers: bootstrap  # each public header compiles alone
	@tools/compile_headers
tidy: bootstrap-tidy bootstrap-clang  # the units of the clang build: headers are read once per unit
	@$(call configured,clang)
	@sed -n 's/.*"file": "\(.*\/tessera[a-z_]*\.dir\/Unity\/.*\)".*/\1/p' build/clang/compile_commands.json | \
	 xargs -P $(J) -n 1 clang-tidy -p build/clang --quiet
clean:
	@rm -rf build
