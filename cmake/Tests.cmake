# core_tests: all of tests/cpp in one binary, over the very objects of the core.

if(CMAKE_CROSSCOMPILING)
  # The installed library is for this machine; its sources serve any other.
  set(gtest_source /usr/src/googletest/googletest)
  if(NOT EXISTS ${gtest_source})
    message(FATAL_ERROR "The C++ tests need GoogleTest's sources to be cross-"
                        "compiled. Type: apt-get install googletest")
  endif()
  add_library(gtest_main STATIC EXCLUDE_FROM_ALL ${gtest_source}/src/gtest-all.cc
                                                 ${gtest_source}/src/gtest_main.cc)
  target_include_directories(gtest_main PRIVATE ${gtest_source})
  target_include_directories(gtest_main SYSTEM PUBLIC ${gtest_source}/include)
  add_library(GTest::gtest_main ALIAS gtest_main)
  add_library(GTest::gtest ALIAS gtest_main)
  set(GTest_FOUND TRUE)
else()
  find_package(GTest QUIET)
endif()
if(NOT GTest_FOUND)
  message(FATAL_ERROR "The C++ tests need GoogleTest. Type: apt-get install "
                      "libgtest-dev (or set GTest_ROOT)")
endif()

set(test_sources
    tests/cpp/bound_of_tests.cc
    tests/cpp/base_budget_test.cc
    tests/cpp/base_siphash_test.cc
    tests/cpp/base_status_test.cc
    tests/cpp/os_byte_sink_test.cc
    tests/cpp/os_byte_source_test.cc
    tests/cpp/os_directory_test.cc
    tests/cpp/os_fault_test.cc
    tests/cpp/os_file_test.cc
    tests/cpp/os_local_socket_test.cc
    tests/cpp/os_lock_test.cc
    tests/cpp/os_machine_test.cc
    tests/cpp/os_shared_memory_test.cc
    tests/cpp/os_trial_directory_test.cc
    tests/cpp/os_trials_test.cc
    tests/cpp/runtime_adopted_test.cc
    tests/cpp/runtime_arena_test.cc
    tests/cpp/runtime_crc32_test.cc
    tests/cpp/runtime_crc32c_test.cc
    tests/cpp/runtime_cuda_copy_test.cc
    tests/cpp/runtime_cuda_driver_test.cc
    tests/cpp/runtime_fresh_memory_test.cc
    tests/cpp/runtime_handles_test.cc
    tests/cpp/runtime_jobs_test.cc
    tests/cpp/runtime_slots_test.cc
    tests/cpp/runtime_workers_test.cc
    tests/cpp/format_catalog_test.cc
    tests/cpp/format_dtype_test.cc
    tests/cpp/format_hf_index_test.cc
    tests/cpp/format_hostile_test.cc
    tests/cpp/format_manifest_test.cc
    tests/cpp/format_name_index_test.cc
    tests/cpp/format_names_test.cc
    tests/cpp/format_pickle_test.cc
    tests/cpp/format_safetensors_test.cc
    tests/cpp/format_sharding_info_test.cc
    tests/cpp/format_short_header_test.cc
    tests/cpp/format_zarr_array_test.cc
    tests/cpp/format_zip_test.cc
    tests/cpp/values_cast_test.cc
    tests/cpp/values_numbers_test.cc
    tests/cpp/values_scaled_test.cc
    tests/cpp/plan_byte_box_test.cc
    tests/cpp/plan_clip_test.cc
    tests/cpp/plan_copy_run_test.cc
    tests/cpp/plan_cover_test.cc
    tests/cpp/plan_divide_test.cc
    tests/cpp/plan_join_test.cc
    tests/cpp/plan_layout_test.cc
    tests/cpp/plan_mesh_test.cc
    tests/cpp/plan_packed_run_test.cc
    tests/cpp/plan_ranges_test.cc
    tests/cpp/plan_runs_test.cc
    tests/cpp/plan_share_test.cc
    tests/cpp/engine_casts_test.cc
    tests/cpp/engine_checkpoint_test.cc
    tests/cpp/engine_commit_damage_test.cc
    tests/cpp/engine_commit_fault_test.cc
    tests/cpp/engine_commit_interleave_test.cc
    tests/cpp/engine_commit_many_test.cc
    tests/cpp/engine_commit_nodes_test.cc
    tests/cpp/engine_commit_test.cc
    tests/cpp/engine_crash_states.cc
    tests/cpp/engine_crash_test.cc
    tests/cpp/engine_cuda_test.cc
    tests/cpp/engine_direct_io_test.cc
    tests/cpp/engine_fill_test.cc
    tests/cpp/engine_final_files_test.cc
    tests/cpp/engine_foreign_target_test.cc
    tests/cpp/engine_header_io_test.cc
    tests/cpp/engine_data_layout_test.cc
    tests/cpp/engine_joined_boxes_test.cc
    tests/cpp/engine_two_layouts_test.cc
    tests/cpp/engine_late_view_test.cc
    tests/cpp/engine_made_tensors_test.cc
    tests/cpp/engine_merge_job_test.cc
    tests/cpp/engine_open_files_test.cc
    tests/cpp/engine_output_crcs_test.cc
    tests/cpp/engine_output_files_test.cc
    tests/cpp/engine_parts_test.cc
    tests/cpp/engine_random_test.cc
    tests/cpp/engine_read_casts_test.cc
    tests/cpp/engine_read_cache_test.cc
    tests/cpp/engine_read_job_test.cc
    tests/cpp/engine_remove_test.cc
    tests/cpp/engine_ring_test.cc
    tests/cpp/engine_save_job_test.cc
    tests/cpp/engine_scan_test.cc
    tests/cpp/engine_snapshot_job_test.cc
    tests/cpp/engine_stored_places_test.cc
    tests/cpp/engine_stored_view_test.cc
    tests/cpp/engine_test_util.cc
    tests/cpp/engine_torch_leaves_test.cc
    tests/cpp/engine_value_jobs_test.cc
    tests/cpp/engine_verify_job_test.cc
    tests/cpp/engine_write_job_test.cc
    tests/cpp/json_fields_test.cc
    tests/cpp/capi_probe_requests_test.cc
    tests/cpp/final_test_util.cc
    tests/cpp/interleaver.cc)
# A test that starts no thread shows nothing under the thread sanitizer. Those of
# the engine have its jobs do it; below it a test says so itself, since no code
# does (test_layering.py).
if(TORCH_CKPT_SANITIZE STREQUAL "thread")
  foreach(source IN LISTS test_sources)
    file(STRINGS ${source} threads REGEX "std::thread|ForEachItem")
    if(NOT threads AND source MATCHES "/(base|os|runtime|format|values|plan)_")
      list(REMOVE_ITEM test_sources ${source})
    endif()
  endforeach()
endif()
add_executable(core_tests $<TARGET_OBJECTS:core> ${test_sources})
# What makes and compares bytes, one at a time.
set_source_files_properties(
  tests/cpp/engine_test_util.cc tests/cpp/final_test_util.cc
  PROPERTIES COMPILE_OPTIONS -O2 SKIP_PRECOMPILE_HEADERS ON)
if(TORCH_CKPT_UNITY)
  # Those of the engine, which are the long ones, four at a time.
  set(piece 0)
  foreach(source IN LISTS test_sources)
    if(source MATCHES "/engine_.*_test[.]cc")
      math(EXPR group "${piece} / 4")
      math(EXPR piece "${piece} + 1")
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP engine_${group})
    endif()
  endforeach()
  set_target_properties(core_tests PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endif()
target_include_directories(core_tests PRIVATE csrc)
target_link_libraries(
  core_tests PRIVATE torch_ckpt_options nlohmann_headers GTest::gtest
                     GTest::gtest_main Threads::Threads ${CMAKE_DL_LIBS})
# Much of what building takes are tests: they share headers, need no speed, and it
# is not them that are tested for undefined behaviour.
target_compile_options(core_tests PRIVATE -O0)
if(TORCH_CKPT_SANITIZE)
  target_compile_definitions(core_tests PRIVATE TORCH_CKPT_SANITIZED)
endif()
if(TORCH_CKPT_SANITIZE STREQUAL "address")
  target_compile_options(core_tests PRIVATE -fno-sanitize=undefined)
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")  # nor are they what fuzzers are to reach
    target_compile_options(core_tests PRIVATE -fno-sanitize=fuzzer-no-link)
  endif()
endif()
target_precompile_headers(
  core_tests PRIVATE <gtest/gtest.h> <algorithm> <cstring> <filesystem>
  <fstream> <functional> <map> <memory> <random> <string> <thread> <vector>)

# Loaded by the tests as the CUDA driver is by the core.
add_library(fake_cuda MODULE tests/cpp/fake_cuda.cc)
add_library(fake_old_cuda MODULE tests/cpp/fake_cuda.cc)
target_compile_definitions(fake_old_cuda PRIVATE FAKE_CUDA_BEFORE_12_8)
foreach(driver IN ITEMS fake_cuda fake_old_cuda)
  target_link_libraries(${driver} PRIVATE torch_ckpt_options)
  add_dependencies(core_tests ${driver})
endforeach()
target_compile_definitions(
  core_tests PRIVATE TORCH_CKPT_FAKE_CUDA="$<TARGET_FILE:fake_cuda>"
                     TORCH_CKPT_FAKE_OLD_CUDA="$<TARGET_FILE:fake_old_cuda>")

enable_testing()
add_test(NAME core_tests COMMAND core_tests)
