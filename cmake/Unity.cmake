# Compiles the core by up to twelve files of one room at a time, since much of the
# work is the standard library's templates, again in every file. For trees that
# are built once: an edit compiles twelve files, and an include that is missing is
# not noticed.

get_target_property(sources core SOURCES)
foreach(source IN LISTS sources)
  string(REGEX REPLACE "^csrc/([a-z]+)/.*" "\\1" room "${source}")
  if(NOT DEFINED files_of_${room})
    set(files_of_${room} 0)
  endif()
  math(EXPR piece "${files_of_${room}} / 12")
  math(EXPR files_of_${room} "${files_of_${room}} + 1")
  set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${room}_${piece})
endforeach()
set_target_properties(core PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Of classes that a header declares and one file defines, with what only that
  # file knows.
  target_compile_options(core PRIVATE -Wno-subobject-linkage)
endif()
