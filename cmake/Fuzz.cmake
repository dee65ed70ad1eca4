# libFuzzer targets over the parsers of untrusted bytes; `./dev fuzz` runs them.

if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang" OR NOT TORCH_CKPT_SANITIZE STREQUAL
                                                "address")
  message(FATAL_ERROR "The fuzz targets need clang and its address sanitizer: "
                      "set CXX=clang++ and TORCH_CKPT_SANITIZE=address")
endif()

add_custom_target(fuzz_targets)
function(torch_ckpt_fuzz_target source)
  get_filename_component(name ${source} NAME_WE)
  add_executable(${name} EXCLUDE_FROM_ALL ${source} $<TARGET_OBJECTS:core>)
  add_dependencies(fuzz_targets ${name})
  target_include_directories(${name} PRIVATE csrc)
  target_link_libraries(${name} PRIVATE torch_ckpt_options nlohmann_headers
                                        Threads::Threads ${CMAKE_DL_LIBS})
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
endfunction()

torch_ckpt_fuzz_target(tests/fuzz/catalog_fuzz.cc)
torch_ckpt_fuzz_target(tests/fuzz/dcp_metadata_fuzz.cc)
torch_ckpt_fuzz_target(tests/fuzz/header_fuzz.cc)
torch_ckpt_fuzz_target(tests/fuzz/hf_index_fuzz.cc)
torch_ckpt_fuzz_target(tests/fuzz/manifest_fuzz.cc)
torch_ckpt_fuzz_target(tests/fuzz/pickle_fuzz.cc)
torch_ckpt_fuzz_target(tests/fuzz/scaled_fuzz.cc)
torch_ckpt_fuzz_target(tests/fuzz/sharding_info_fuzz.cc)
torch_ckpt_fuzz_target(tests/fuzz/short_header_fuzz.cc)
torch_ckpt_fuzz_target(tests/fuzz/torch_archive_fuzz.cc)
torch_ckpt_fuzz_target(tests/fuzz/view_fuzz.cc)
torch_ckpt_fuzz_target(tests/fuzz/zarr_array_fuzz.cc)
torch_ckpt_fuzz_target(tests/fuzz/zip_fuzz.cc)
