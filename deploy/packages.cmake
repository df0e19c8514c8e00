# packages.cmake: the Debian packages, made by `cpack -G DEB` in a build folder.
#   bellwether         what serves: bellwetherd, the command, the laboratory, unit, configuration
#   bellwether-client  what training machines need: sender, C libraries and headers
# Trainers in Python take the wheel instead (wheel.sh).
install(DIRECTORY ${CMAKE_CURRENT_LIST_DIR}/alertmanager ${CMAKE_CURRENT_LIST_DIR}/policy
  ${CMAKE_CURRENT_LIST_DIR}/rules ${CMAKE_CURRENT_LIST_DIR}/webhook
  DESTINATION ${CMAKE_INSTALL_DATADIR}/bellwether COMPONENT service)
install(DIRECTORY ${CMAKE_CURRENT_LIST_DIR}/postgres
  DESTINATION ${CMAKE_INSTALL_DATADIR}/bellwether COMPONENT service)
install(FILES ${CMAKE_CURRENT_LIST_DIR}/systemd/bellwetherd.service.d/gpu.conf
  DESTINATION ${CMAKE_INSTALL_DATADIR}/bellwether/systemd COMPONENT service)

set(CPACK_PACKAGE_NAME bellwether)
set(CPACK_PACKAGE_CONTACT "Bellwether maintainers <bellwether@users.noreply.github.com>")
set(CPACK_VERBATIM_VARIABLES ON)
set(CPACK_GENERATOR DEB)
set(CPACK_STRIP_FILES ON)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS
  OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(CPACK_COMPONENTS_ALL service client kernels)
set(CPACK_COMPONENTS_GROUPING ONE_PER_GROUP)

set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY ">=")
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(debian ${CMAKE_CURRENT_LIST_DIR}/debian)
set(CPACK_DEBIAN_SERVICE_PACKAGE_NAME bellwether)
set(CPACK_DEBIAN_SERVICE_PACKAGE_SECTION net)
set(CPACK_DEBIAN_SERVICE_PACKAGE_DEPENDS adduser)
set(CPACK_DEBIAN_SERVICE_PACKAGE_SUGGESTS libpq5)  # Opened by servers of a cluster.
set(CPACK_DEBIAN_SERVICE_DESCRIPTION "Watches the numerics of attention inside running training jobs, names the layer
and head that will destroy a run thousands of steps before the loss shows it,
and says what to do.
.
This package has the server, with its page and metrics, and the command.")
set(CPACK_DEBIAN_SERVICE_PACKAGE_CONTROL_EXTRA
  ${debian}/conffiles ${debian}/postinst ${debian}/prerm ${debian}/postrm)
set(CPACK_DEBIAN_CLIENT_PACKAGE_NAME bellwether-client)
set(CPACK_DEBIAN_CLIENT_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_CLIENT_DESCRIPTION "What a training job in C or C++ links, to be watched by a bellwetherd: the
client library, the process that sends for it, the kernels of the statistics,
headers and the files of CMake and pkg-config.
.
Jobs in Python install the wheel instead.")
set(CPACK_DEBIAN_CLIENT_PACKAGE_CONTROL_EXTRA ${debian}/triggers)

# The newest commit's time, or the epoch that a reproducible build names.
find_package(Git QUIET)
set(changelog_time $ENV{SOURCE_DATE_EPOCH})
if(NOT changelog_time AND Git_FOUND)
  execute_process(COMMAND ${GIT_EXECUTABLE} log -1 --format=%ct WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
    OUTPUT_VARIABLE changelog_time OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT changelog_time)
  set(changelog_time 0)
endif()
execute_process(COMMAND date --utc --rfc-email --date=@${changelog_time}
  OUTPUT_VARIABLE changelog_date OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
set(CPACK_BELLWETHER_CHANGELOG ${PROJECT_BINARY_DIR}/debian/changelog)
configure_file(${debian}/changelog.in ${CPACK_BELLWETHER_CHANGELOG} @ONLY)
set(CPACK_PRE_BUILD_SCRIPTS ${debian}/stage.cmake)

include(CPack)
cpack_add_component_group(service)
cpack_add_component_group(client)
cpack_add_component(service GROUP service)
cpack_add_component(client GROUP client)
cpack_add_component(kernels GROUP client)
