# stage.cmake: run by CPack on what install() has laid out, before the packages
# are made of it.  Adds what only Debian wants, and where it wants it.
cmake_minimum_required(VERSION 3.25)
unset(ENV{DESTDIR})  # CPack's own, which file(INSTALL) would put before these paths.
set(deploy ${CMAKE_CURRENT_LIST_DIR}/..)
set(service ${CPACK_TEMPORARY_DIRECTORY}/service)
set(client ${CPACK_TEMPORARY_DIRECTORY}/client)

file(INSTALL ${deploy}/config/bellwetherd.yml ${deploy}/config/rules.yml ${deploy}/config/policy.yml
  DESTINATION ${service}/etc/bellwether)
file(INSTALL ${deploy}/systemd/bellwetherd.service DESTINATION ${service}/lib/systemd/system)
file(INSTALL ${deploy}/debian/lintian/bellwether DESTINATION ${service}/usr/share/lintian/overrides)

foreach(package service client)
  set(root ${CPACK_TEMPORARY_DIRECTORY}/${package})
  set(name bellwether)
  if(package STREQUAL "client")
    set(name bellwether-client)
  endif()
  set(doc ${root}/usr/share/doc/${name})
  file(INSTALL ${deploy}/debian/copyright DESTINATION ${doc})
  file(INSTALL ${CPACK_BELLWETHER_CHANGELOG} DESTINATION ${doc} RENAME changelog.Debian)
  file(INSTALL ${deploy}/../CHANGELOG.md DESTINATION ${doc} RENAME changelog)

  # A program finds its libraries where Debian has them: a path of its own would come before.
  file(GLOB programs ${root}/usr/bin/* ${root}/usr/lib/*.so*)
  foreach(program IN LISTS programs)
    if(NOT IS_SYMLINK ${program})
      file(RPATH_REMOVE FILE ${program})
    endif()
  endforeach()

  file(GLOB_RECURSE pages ${root}/usr/share/man/*)
  list(FILTER pages EXCLUDE REGEX "\\.gz$")
  execute_process(COMMAND gzip -9nf ${pages} ${doc}/changelog.Debian ${doc}/changelog COMMAND_ERROR_IS_FATAL ANY)
endforeach()
