# libFuzzer targets over the parsers of untrusted bytes; `./dev fuzz` runs them.

if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "The fuzz targets need clang: set CXX=clang++")
endif()

# What the parsers need of the core once more, instrumented; the plain objects
# stay as they are.
get_target_property(core_sources core SOURCES)
list(FILTER core_sources INCLUDE REGEX "csrc/(base|os|runtime|format)/")
add_library(core_fuzzed STATIC ${core_sources})
target_include_directories(core_fuzzed PUBLIC csrc)
target_compile_options(
  core_fuzzed PUBLIC -fsanitize=fuzzer-no-link,address,undefined
                     -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
target_link_libraries(core_fuzzed PUBLIC torch_ckpt_options nlohmann_headers
                                         Threads::Threads ${CMAKE_DL_LIBS})

add_custom_target(fuzz_targets)
function(torch_ckpt_fuzz_target source)
  get_filename_component(name ${source} NAME_WE)
  add_executable(${name} ${source})
  add_dependencies(fuzz_targets ${name})
  target_link_libraries(${name} PRIVATE core_fuzzed)
  target_link_options(${name} PRIVATE -fsanitize=fuzzer,address,undefined)
endfunction()

torch_ckpt_fuzz_target(tests/fuzz/catalog_fuzz.cc)
torch_ckpt_fuzz_target(tests/fuzz/header_fuzz.cc)
torch_ckpt_fuzz_target(tests/fuzz/hf_index_fuzz.cc)
torch_ckpt_fuzz_target(tests/fuzz/manifest_fuzz.cc)
torch_ckpt_fuzz_target(tests/fuzz/sharding_info_fuzz.cc)
torch_ckpt_fuzz_target(tests/fuzz/short_header_fuzz.cc)
