# torch's stable headers and a link to libtorch.so by name only.
#
# No find_package(Torch): its config demands a CUDA toolkit that suits it and
# puts c10 and torch_cuda on link lines. One binary serves every torch from the
# floor on, CPU or CUDA, because it asks only for the C shims of that floor.

torch_ckpt_find_headers(torch torch_include)
message(STATUS "torch headers: ${torch_include}")

# The floor has one home, pyproject.toml: "torch>=2.10" -> 0x020a000000000000,
# that is one byte major, one byte minor, then zeros.
file(STRINGS pyproject.toml floor_line REGEX "^dependencies = .*\"torch>=")
string(REGEX MATCH "torch>=([0-9]+)\\.([0-9]+)" floor "${floor_line}")
if(NOT floor)
  message(FATAL_ERROR "pyproject.toml names no oldest torch")
endif()
math(EXPR floor_hex "(${CMAKE_MATCH_1} << 56) | (${CMAKE_MATCH_2} << 48)"
     OUTPUT_FORMAT HEXADECIMAL)
message(STATUS "torch floor: ${floor} (${floor_hex})")

# A stand-in with the soname libtorch.so gives the extension its DT_NEEDED entry;
# at run time `import torch` has loaded the real one, which the loader matches by
# soname. So no path to a torch is stored, and torch's libraries need not be
# there when we build.
set(stub_source ${CMAKE_CURRENT_BINARY_DIR}/stub/libtorch.cc)
if(NOT EXISTS ${stub_source})
  file(WRITE ${stub_source} "// Nothing: only the library's name matters.\n")
endif()
add_library(torch_stub SHARED ${stub_source})
set_target_properties(
  torch_stub PROPERTIES OUTPUT_NAME torch LIBRARY_OUTPUT_DIRECTORY
                                          ${CMAKE_CURRENT_BINARY_DIR}/stub)

add_library(torch_stable INTERFACE)
target_include_directories(torch_stable SYSTEM INTERFACE ${torch_include})
target_compile_definitions(torch_stable
                           INTERFACE TORCH_TARGET_VERSION=${floor_hex})
# The stub defines nothing, so the linker would drop it under --as-needed.
target_link_libraries(torch_stable INTERFACE torch_stub)
target_link_options(torch_stable INTERFACE LINKER:--no-as-needed)
