#include "tests/support/postgres_server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <pwd.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

extern char** environ;

namespace bellwether::server {
namespace {

namespace fs = std::filesystem;
constexpr char kRole[] = "bellwether";

// Where initdb lies; Debian keeps it off the PATH.  "": nowhere.
std::string FindPrograms() {
  std::error_code error;
  const char* const path = std::getenv("PATH");
  for (const auto& folder : absl::StrSplit(path == nullptr ? "" : path, ':')) {
    const fs::path found = fs::path(std::string(folder)) / "initdb";
    if (fs::exists(found, error)) return fs::canonical(found).parent_path().string();
  }
  int newest = 0;
  std::string programs;
  for (const auto& version : fs::directory_iterator("/usr/lib/postgresql", error)) {
    int number = 0;
    if (!absl::SimpleAtoi(version.path().filename().string(), &number) || number <= newest) continue;
    if (!fs::exists(version.path() / "bin" / "initdb", error)) continue;
    newest = number;
    programs = (version.path() / "bin").string();
  }
  return programs;
}

int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  const bool bound = bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  close(fd);
  return bound ? ntohs(address.sin_port) : -1;
}

}  // namespace

std::unique_ptr<PostgresServer> PostgresServer::Start() {
  std::unique_ptr<PostgresServer> server(new PostgresServer());
  server->programs_ = FindPrograms();
  if (server->programs_.empty()) return nullptr;
  // Short, for the socket's path, and below a folder that another user may enter.
  server->folder_ = "/tmp/bellwether-pg-XXXXXX";
  if (mkdtemp(server->folder_.data()) == nullptr) {
    ADD_FAILURE() << "no temporary folder";
    return nullptr;
  }
  if (geteuid() == 0) {
    const passwd* user = getpwnam("postgres");
    if (user == nullptr) user = getpwnam("nobody");
    if (user == nullptr || chown(server->folder_.c_str(), user->pw_uid, user->pw_gid) != 0) {
      ADD_FAILURE() << "neither postgres nor nobody is a user here";
      return nullptr;
    }
    server->as_user_ = {"setpriv", absl::StrCat("--reuid=", user->pw_uid), absl::StrCat("--regid=", user->pw_gid),
                        "--clear-groups", "--"};
  }
  const std::string data = server->folder_ + "/data";
  if (!server->Run("initdb", {"-D", data, "-U", "owner", "-A", "trust", "-E", "UTF8", "--no-sync", "--no-locale"})) {
    return nullptr;
  }
  const int port = FreePort();
  std::ofstream(data + "/postgresql.auto.conf", std::ios::app)
      << "listen_addresses = ''\nport = " << port << "\nunix_socket_directories = '" << server->folder_
      << "'\nshared_buffers = '16MB'\nmax_connections = '40'\nfsync = 'off'\n";
  server->process_ = server->Spawn("postgres", {"-D", data}, "/dev/null");
  const std::string where = absl::StrCat("host=", server->folder_, " port=", port);
  server->owner_dsn_ = where + " user=owner dbname=postgres";
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (;;) {
    auto connected = PgConnection::Connect(server->owner_dsn_, 1000);
    if (connected.ok()) {
      server->owner_ = *std::move(connected);
      break;
    }
    if (absl::IsFailedPrecondition(connected.status())) return nullptr;  // No libpq.
    if (std::chrono::steady_clock::now() > deadline) {
      ADD_FAILURE() << "PostgreSQL does not start: " << connected.status();
      return nullptr;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  for (const char* const file :
       {"001_tables.sql", "engine_postgresql.sql", "roles.sql", "002_peers.sql", "003_databases.sql"}) {
    if (!server->Run("psql",
                     {"-qX", "-v", "ON_ERROR_STOP=1", "-h", server->folder_, "-p", absl::StrCat(port), "-U", "owner",
                      "-d", "postgres", "-f", "-"},
                     absl::StrCat(BELLWETHER_SCHEMA, "/", file))) {
      return nullptr;
    }
  }
  server->Sql(absl::StrCat("CREATE ROLE ", kRole, " LOGIN IN ROLE bellwether_server"));
  server->dsn_ = absl::StrCat(where, " user=", kRole, " dbname=postgres");
  return server;
}

PostgresServer::~PostgresServer() {
  owner_.reset();
  if (process_ > 0) {
    kill(process_, SIGQUIT);
    waitpid(process_, nullptr, 0);
  }
  std::error_code error;
  if (!folder_.empty()) fs::remove_all(folder_, error);
}

pid_t PostgresServer::Spawn(const std::string& program, const std::vector<std::string>& words,
                            const std::string& input) const {
  std::vector<std::string> all = as_user_;
  all.push_back(programs_ + "/" + program);
  all.insert(all.end(), words.begin(), words.end());
  std::vector<char*> argv;
  for (std::string& word : all) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, 0, input.c_str(), O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, 1, (folder_ + "/log").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  posix_spawn_file_actions_adddup2(&files, 1, 2);
  pid_t process = -1;
  EXPECT_EQ(posix_spawnp(&process, argv[0], &files, nullptr, argv.data(), environ), 0) << all[0];
  posix_spawn_file_actions_destroy(&files);
  return process;
}

bool PostgresServer::Run(const std::string& program, const std::vector<std::string>& words, const std::string& input) {
  const pid_t process = Spawn(program, words, input);
  int status = -1;
  if (process < 0 || waitpid(process, &status, 0) != process || status != 0) {
    std::ifstream log(folder_ + "/log");
    ADD_FAILURE() << program << " failed: " << std::string(std::istreambuf_iterator<char>(log), {});
    return false;
  }
  return true;
}

std::vector<PgResult> PostgresServer::Sql(const std::string& statement) {
  auto results = owner_->Run({{statement, {}}}, 10'000);
  EXPECT_TRUE(results.ok()) << statement << ": " << results.status();
  return results.ok() ? *std::move(results) : std::vector<PgResult>();
}

int64_t PostgresServer::Number(const std::string& query) {
  const auto results = Sql(absl::StrCat("SELECT CAST((", query, ") AS bigint)"));
  if (results.empty() || results[0].rows() == 0) {
    ADD_FAILURE() << query << ": no row";
    return -1;
  }
  return results[0].IsNull(0, 0) ? -1 : results[0].Number(0, 0);
}

bool PostgresServer::Await(const std::string& query) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (Number(query) <= 0) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

void PostgresServer::Set(const std::string& name, const std::string& value) {
  std::ofstream(folder_ + "/data/postgresql.auto.conf", std::ios::app) << name << " = '" << value << "'\n";
  const std::string sees =
      absl::StrCat("SELECT count(*) FROM pg_settings WHERE name = '", name, "' AND setting = '", value, "'");
  Sql("SELECT pg_reload_conf()");
  EXPECT_TRUE(Await(sees)) << name;
  if (name == "synchronous_standby_names" && !value.empty()) AwaitStandbysWanted();
}

// Who commits asks what the checkpointer has told all of them, and that one may read its
// files later than the process that answers here.
void PostgresServer::AwaitStandbysWanted() {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (std::chrono::steady_clock::now() < deadline) {
    auto probe = PgConnection::Connect(owner_dsn_, 10'000);
    ASSERT_TRUE(probe.ok()) << probe.status();
    const auto pid = (*probe)->Run({{"SELECT CAST(pg_backend_pid() AS bigint)", {}}}, 10'000);
    ASSERT_TRUE(pid.ok()) << pid.status();
    const std::string its = absl::StrCat("FROM pg_stat_activity WHERE pid = ", pid->front().Number(0, 0));
    const bool answered = (*probe)->Run({{"SELECT pg_logical_emit_message(true, 'probe', '')", {}}}, 100).ok();
    if (answered) continue;
    const bool waits = Number(absl::StrCat("SELECT count(*) ", its, " AND wait_event = 'SyncRep'")) > 0;
    Sql(absl::StrCat("SELECT pg_terminate_backend(pid) ", its));
    EXPECT_TRUE(Await(absl::StrCat("SELECT 1 - count(*) ", its)));
    if (waits) return;
  }
  ADD_FAILURE() << "no commit waits for a standby";
}

}  // namespace bellwether::server
