# How the two libraries are named, placed and closed.

# Makes `target` the package library torch_ckpt/<name>.so, which exports only
# what cmake/<name>.map lists. Without the map weak libstdc++ and json symbols
# leak out and may be bound across libraries built by other compilers.
function(torch_ckpt_package_library target name)
  if(CMAKE_LIBRARY_OUTPUT_DIRECTORY)
    set(folder ${CMAKE_LIBRARY_OUTPUT_DIRECTORY})
  else()
    set(folder ${PROJECT_SOURCE_DIR}/torch_ckpt)
  endif()
  set(map ${PROJECT_SOURCE_DIR}/cmake/${name}.map)
  set_target_properties(
    ${target}
    PROPERTIES PREFIX ""
               OUTPUT_NAME ${name}
               LIBRARY_OUTPUT_DIRECTORY ${folder}
               LINK_DEPENDS ${map}
               # CMake's own run path would name build folders.
               SKIP_BUILD_RPATH ON)
  target_link_options(${target} PRIVATE "LINKER:--version-script=${map}"
                      "LINKER:-Bsymbolic-functions")
  if(name STREQUAL "libtorch_ckpt_core" AND NOT TORCH_CKPT_SANITIZE)
    # A source that is missing from the list fails here, not at import.
    target_link_options(${target} PRIVATE "LINKER:--no-undefined")
  endif()
endfunction()
