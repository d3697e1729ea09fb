# The fuzzers (preset fuzz): the program tessera_fuzz with libFuzzer and the targets of tests/fuzz. The files below,
# which parse, are compiled into it under the address and undefined-behaviour sanitizers. All else, such as the schemas
# of our ops, comes from the libraries of the preset release: build that first. tools/run_fuzzers runs the program.
set(TESSERA_FUZZ_LIBRARIES ${CMAKE_CURRENT_SOURCE_DIR}/build/release/lib
    CACHE PATH "The built libraries for the fuzzers")
set(parsers
    base/detail/json base/detail/mapped_file
    comm/detail/store/wire mesh/mesh_shape placement/placement
    checkpoint/detail/box checkpoint/detail/checkpoint_source checkpoint/detail/distcp checkpoint/detail/manifest
    checkpoint/detail/pickle checkpoint/detail/reshard checkpoint/detail/safetensors checkpoint/detail/zip_archive
    checkpoint/safetensors_file pipelining/detail/action pipelining/detail/action_table
    compile/detail/ir/collective compile/detail/ir/constant_text compile/detail/ir/dependencies
    compile/detail/ir/inflight_collectives compile/detail/ir/op_table compile/detail/ir/parse compile/detail/ir/print
    compile/detail/ir/program compile/detail/ir/schema_match compile/detail/ir/type compile/detail/ir/verify
    tensor_parallel/detail/glob tensor_parallel/detail/plan_text tensor_parallel/plan tensor_parallel/style
    data/token_file train/config)
list(TRANSFORM parsers PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/tessera/)
list(TRANSFORM parsers APPEND .cpp)
find_path(TESSERA_TOML_INCLUDE toml++/toml.h)
mark_as_advanced(TESSERA_TOML_INCLUDE)
file(GLOB fuzz_targets CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tests/fuzz/*_fuzz.cpp)

add_executable(tessera_fuzz ${parsers} ${CMAKE_CURRENT_SOURCE_DIR}/tessera/cli/toml.cpp ${fuzz_targets}
               ${CMAKE_CURRENT_SOURCE_DIR}/tests/fuzz/fuzz_targets.cpp
               ${CMAKE_CURRENT_SOURCE_DIR}/tests/fuzz/fuzz_main.cpp)
tessera_our_code(tessera_fuzz)
tessera_unity(tessera_fuzz)
target_include_directories(tessera_fuzz PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_include_directories(tessera_fuzz SYSTEM PRIVATE ${TESSERA_TOML_INCLUDE})
target_link_libraries(tessera_fuzz PRIVATE ${TESSERA_FUZZ_LIBRARIES}/libtessera.so
                                           ${TESSERA_FUZZ_LIBRARIES}/libtessera_train.so Tessera::torch)
target_link_options(tessera_fuzz PRIVATE -fsanitize=fuzzer)
