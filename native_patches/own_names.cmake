# Names of their own for the libraries of llama.cpp: libllamabatch-llama.so in place of libllama.so.0, and so on.
#
# Without it: the dynamic linker takes two libraries of one SONAME for the same. Where a process has loaded another
# libllama first (llama-cpp-python's), ours would get that one's ggml, and the other way round.
#
# Given to CMake as -DCMAKE_PROJECT_llama_cpp_INCLUDE=<this file>, which includes it after the first project().
# LLAMABATCH_PREFIX is what stands before each name; empty for llama-cpp-python's own binding, as `make setup` builds it.

if(NOT DEFINED LLAMABATCH_PREFIX)
    set(LLAMABATCH_PREFIX "llamabatch-")
endif()

function(llamabatch_own_names folder)
    get_property(targets DIRECTORY "${folder}" PROPERTY BUILDSYSTEM_TARGETS)
    foreach(target IN LISTS targets)
        get_target_property(type ${target} TYPE)
        if(type MATCHES "^(SHARED|MODULE)_LIBRARY$")
            set_target_properties(${target} PROPERTIES OUTPUT_NAME "${LLAMABATCH_PREFIX}${target}" PREFIX "lib")
            set_property(TARGET ${target} PROPERTY VERSION)   # no file name with a number, and so no links to it:
            set_property(TARGET ${target} PROPERTY SOVERSION) # a wheel would hold a copy in the place of each
        endif()
    endforeach()
    get_property(folders DIRECTORY "${folder}" PROPERTY SUBDIRECTORIES)
    foreach(one IN LISTS folders)
        llamabatch_own_names("${one}")
    endforeach()
endfunction()

cmake_language(DEFER DIRECTORY "${CMAKE_SOURCE_DIR}" CALL llamabatch_own_names "${CMAKE_SOURCE_DIR}")
