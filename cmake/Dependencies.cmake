# Headers that come from Python packages, found anew at every configure: under
# build isolation pip deletes the environment they were in, so that a cached
# path would break the next build.

find_package(Python COMPONENTS Interpreter REQUIRED)

# Sets ${out} to the last line that cmake/find_headers.py prints for `what`;
# stops with the script's own line of advice when it fails.
function(torch_ckpt_find_headers what out)
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/find_headers.py
            ${what}
    OUTPUT_VARIABLE found
    ERROR_VARIABLE advice
    RESULT_VARIABLE code
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${advice}")
  endif()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

torch_ckpt_find_headers(nlohmann_json nlohmann_include)
message(STATUS "nlohmann_json headers: ${nlohmann_include}")
add_library(nlohmann_headers INTERFACE)
target_include_directories(nlohmann_headers SYSTEM
                           INTERFACE ${nlohmann_include})
