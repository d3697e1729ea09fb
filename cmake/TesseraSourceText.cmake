# The text of headers that kernels for a GPU contain, which are compiled at run time: source_text/<name>.inc in the build
# folder is a string literal of tessera/<folder>/<name>.h without its #include and #pragma lines.
function(tessera_source_text target)
  foreach(header ${ARGN})
    get_filename_component(name ${header} NAME_WE)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${header})
    file(READ ${CMAKE_CURRENT_SOURCE_DIR}/${header} text)
    string(REGEX REPLACE "#(include|pragma)[^\n]*\n" "" text "${text}")
    file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/source_text/${name}.inc CONTENT "R\"CUDA(@text@)CUDA\"\n" @ONLY)
  endforeach()
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/source_text)
endfunction()
