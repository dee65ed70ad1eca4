# Language level, warnings, sanitizers and the switches every target shares.

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION
                                            VERSION_LESS 11)
  message(
    FATAL_ERROR
      "torch_ckpt needs g++ >= 11, found ${CMAKE_CXX_COMPILER_VERSION}. "
      "Type: apt-get install g++ (or set CXX to a newer compiler)")
endif()
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
  message(FATAL_ERROR "torch_ckpt runs on Linux only")
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# -g1 keeps line numbers for stack traces and sanitizers at little cost in size.
# Sanitized code is run once, and takes twice as long to compile at -O2.
if(TORCH_CKPT_SANITIZE)
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O1 -g1")
else()
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1")
endif()

find_package(Threads REQUIRED)
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

add_library(torch_ckpt_options INTERFACE)
target_compile_options(torch_ckpt_options INTERFACE -Wall -Wextra -Wconversion)
target_compile_definitions(
  torch_ckpt_options INTERFACE TORCH_CKPT_VERSION="${TORCH_CKPT_VERSION}")
if(TORCH_CKPT_WERROR)
  target_compile_options(torch_ckpt_options INTERFACE -Werror)
endif()
if(TORCH_CKPT_FAULTS)
  target_compile_definitions(torch_ckpt_options INTERFACE TORCH_CKPT_FAULTS)
endif()

if(TORCH_CKPT_SANITIZE STREQUAL "address")
  set(sanitize_flags -fsanitize=address,undefined -fno-omit-frame-pointer
                     -fno-sanitize-recover=undefined)
  # The fuzz targets are of the same objects: they count what was reached. The
  # CUDA driver is called with handles of our own types, as C allows.
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    list(APPEND sanitize_flags -fsanitize=fuzzer-no-link -fno-sanitize=function)
  endif()
elseif(TORCH_CKPT_SANITIZE STREQUAL "thread")
  set(sanitize_flags -fsanitize=thread -fno-omit-frame-pointer)
elseif(TORCH_CKPT_SANITIZE)
  message(FATAL_ERROR "TORCH_CKPT_SANITIZE is address, thread or empty, not "
                      "'${TORCH_CKPT_SANITIZE}'")
endif()
target_compile_options(torch_ckpt_options INTERFACE ${sanitize_flags})
target_link_options(torch_ckpt_options INTERFACE ${sanitize_flags})
