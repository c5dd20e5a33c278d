# The portable build: names of their own for the libraries (own_names.cmake), and in OpenMP's place our teams of threads.
#
# Without it: a wheel would have to bring an OpenMP runtime, which is a second one where torch or scikit-learn bring
# theirs; ggml's own threads, without OpenMP, spin at each barrier until the last one has come, however long that takes,
# and are made anew for each step.
#
# Given to CMake as -DCMAKE_PROJECT_llama_cpp_INCLUDE=<this file>, with LLAMABATCH_VARIANTS, the names of the variants.

set(LLAMABATCH_TEAMS ${CMAKE_CURRENT_LIST_DIR})
include(${CMAKE_CURRENT_LIST_DIR}/../own_names.cmake)

function(llamabatch_teams)
    target_sources(ggml-base PRIVATE ${LLAMABATCH_TEAMS}/team.c)
    set(variants ${LLAMABATCH_VARIANTS})
    list(TRANSFORM variants PREPEND ggml-cpu-)
    # each finds the others beside itself, wherever the package is
    set_target_properties(llama ggml ggml-base mtmd ${variants} PROPERTIES
        BUILD_WITH_INSTALL_RPATH TRUE
        INSTALL_RPATH "$ORIGIN"
        INSTALL_RPATH_USE_LINK_PATH FALSE
    )
    foreach(target IN LISTS variants)
        target_sources(${target} PRIVATE ${LLAMABATCH_TEAMS}/calls.c)
        target_include_directories(${target} PRIVATE ${LLAMABATCH_TEAMS})
        target_compile_definitions(${target} PRIVATE GGML_USE_OPENMP)
        target_compile_options(${target} PRIVATE -fopenmp)
    endforeach()
endfunction()

cmake_language(DEFER DIRECTORY "${CMAKE_SOURCE_DIR}" CALL llamabatch_teams)
