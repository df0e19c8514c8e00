#include "cli/private_server.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>
#include <vector>

#include "cli/cli.h"
#include "client_lib/src/regular_file.h"

namespace bellwether::cli {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

constexpr size_t kFileBytesMax = 1 << 20;
constexpr size_t kSocketPathMax = 100;  // The kernel's limit is 108.
constexpr auto kReady = 10s;
constexpr auto kLock = 3 * kReady;

std::string HostName() {
  char host[256] = "";
  return gethostname(host, sizeof(host) - 1) == 0 ? host : "";
}

// Empty: there is no home.
fs::path StateFolder() {
  const char* const state = std::getenv("XDG_STATE_HOME");
  const char* const home = std::getenv("HOME");
  if (state != nullptr && *state != '\0') return fs::path(state) / "bellwether";
  if (home != nullptr) return fs::path(home) / ".local" / "state" / "bellwether";
  return {};
}

// What a server.json tells.
PrivateServer ReadReadyFile(const fs::path& path) {
  std::string text, why;
  if (!client::ReadRegularFile(path, kFileBytesMax, &text, &why)) return {};
  const auto file = nlohmann::json::parse(text, nullptr, false);
  if (!file.is_object()) return {};
  const auto pid = file.find("pid");
  if (pid == file.end() || !pid->is_number_integer() || pid->get<pid_t>() <= 0) return {};
  if (kill(pid->get<pid_t>(), 0) != 0 && errno != EPERM) return {};
  const auto value = [&file](const char* name) {
    const auto found = file.find(name);
    return found != file.end() && found->is_string() ? found->get<std::string>() : std::string();
  };
  return {.grpc = value("grpc"), .page = value("http"), .token = value("token"), .data = path.parent_path() / "data"};
}

// The folder's own and, where machines share it, this machine's.
std::vector<fs::path> Places() {
  const fs::path folder = StateFolder();
  if (folder.empty()) return {};
  if (const std::string host = HostName(); !host.empty()) return {folder / "hosts" / host, folder};
  return {folder};
}

std::string ThisHost() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return HostName() + "\n" + boot + "\n";
}

// Whether the folder's server is one of another machine, which may live.
bool OfAnotherHost(const fs::path& folder) {
  std::ifstream file(folder / "server.host");
  std::string host, boot;
  if (!std::getline(file, host) || !std::getline(file, boot)) return false;
  const std::string here = ThisHost();
  const bool same = here.rfind(host + "\n", 0) == 0 || here.find("\n" + boot + "\n") != std::string::npos;
  return !same && fs::exists(folder / "server.json");
}

// A short one where the folder's name is too long; which it is stands in server.json.
std::string SocketPath(const fs::path& folder) {
  const std::string path = folder / "grpc.sock";
  if (path.size() <= kSocketPathMax) return path;
  const fs::path brief = fs::temp_directory_path() / ("bellwether-" + std::to_string(getuid()));
  mkdir(brief.c_str(), 0700);
  struct stat about {};
  if (stat(brief.c_str(), &about) != 0 || about.st_uid != getuid()) return "";
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a.
  for (const char c : path) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  char name[32];
  std::snprintf(name, sizeof name, "%016llx.sock", static_cast<unsigned long long>(hash));
  return brief / name;
}

// Waits from one look to the next, each twice as long as the one before.  Neither a ready file nor
// a lock with a limit of time can be waited for without watching the folder, which NFS does not
// tell of other machines.
class Looks {
 public:
  void Wait() {
    std::this_thread::sleep_for(wait_);
    wait_ = std::min(2 * wait_, kLongest);
  }

 private:
  static constexpr auto kLongest = 100ms;
  std::chrono::milliseconds wait_ = 2ms;
};

// Holds the file that a process locks while it starts a server.
class StartLock {
 public:
  explicit StartLock(const std::string& path) : fd_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
    const auto end = std::chrono::steady_clock::now() + kLock;
    Looks looks;
    while (fd_ >= 0 && !(held_ = flock(fd_, LOCK_EX | LOCK_NB) == 0) && std::chrono::steady_clock::now() < end) {
      looks.Wait();
    }
  }
  ~StartLock() {
    if (fd_ >= 0) close(fd_);
  }
  StartLock(const StartLock&) = delete;
  StartLock& operator=(const StartLock&) = delete;
  bool held() const { return held_; }

 private:
  const int fd_;
  bool held_ = false;
};

// Starts bellwetherd in a session of its own; 0 = it cannot be started.
pid_t Spawn(const fs::path& folder, const std::string& socket, const std::string& log) {
  const std::vector<std::string> flags = {"--storage.path=" + (folder / "data").string(),
                                          "--grpc.listen-address=unix:" + socket,
                                          "--web.listen-address=127.0.0.1:0",
                                          "--gpu=off",  // The GPU here is for training.
                                          "--lifetime.idle-exit=300s",
                                          "--ready.file=" + (folder / "server.json").string()};
  const pid_t child = fork();
  if (child != 0) return std::max(child, 0);
  setsid();  // Ctrl-C is not for the server.
  const int in = open("/dev/null", O_RDONLY), out = open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
  for (const auto& [from, to] : {std::pair(in, 0), std::pair(out, 1), std::pair(out, 2)}) {
    if (from < 0 || dup2(from, to) < 0) _exit(127);
  }
  if (chdir(folder.c_str()) != 0) _exit(127);
  Execute(flags);
  _exit(127);
}

std::string LastLine(const std::string& path) {
  std::ifstream file(path);
  std::string line, last;
  while (std::getline(file, line)) {
    if (!line.empty()) last = line;
  }
  return last;
}

bool HasLineWith(const std::string& path, const std::string& words) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.find(words) != std::string::npos) return true;
  }
  return false;
}

PrivateServer Start(const fs::path& folder, std::string* why) {
  std::error_code error;
  fs::remove(folder / "server.json", error);
  std::ofstream(folder / "server.host") << ThisHost();
  const std::string socket = SocketPath(folder);
  if (socket.empty()) {
    *why = "there is no folder for a socket with a short name";
    return {};
  }
  fs::remove(socket, error);
  const std::string log = folder / "server.log";
  const auto end = std::chrono::steady_clock::now() + kReady;
  pid_t child = 0;
  Looks looks, starts;
  while (std::chrono::steady_clock::now() < end) {
    if (child == 0) child = Spawn(folder, socket, log);
    if (child <= 0) {
      *why = std::string("fork: ") + std::strerror(errno);
      return {};
    }
    if (PrivateServer server = ReadReadyFile(folder / "server.json"); !server.grpc.empty()) return server;
    int status = 0;
    if (waitpid(child, &status, WNOHANG) == child) {
      child = 0;
      *why = "bellwetherd has ended: " + LastLine(log);
      // The one before may still be closing its folder: its ready file goes first, and its last words may come last.
      if (!HasLineWith(log, "one server per directory")) return {};
      starts.Wait();
      looks = {};
      continue;
    }
    looks.Wait();
  }
  if (child == 0) return {};
  kill(child, SIGTERM);
  *why = "bellwetherd was not ready within 10 s: " + LastLine(log);
  return {};
}

bool HasData(const fs::path& data) {
  std::error_code error;
  return fs::exists(data / "db" / "CURRENT", error);
}

}  // namespace

PrivateServer FindPrivateServer() {
  for (const fs::path& place : Places()) {
    if (PrivateServer server = ReadReadyFile(place / "server.json"); !server.grpc.empty()) return server;
  }
  return {};
}

PrivateServer JoinOrStartPrivateServer(std::string* why) {
  fs::path folder = StateFolder();
  if (folder.empty()) {
    *why = "neither HOME nor XDG_STATE_HOME is set";
    return {};
  }
  std::error_code error;
  fs::create_directories(folder.parent_path(), error);
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    *why = folder.string() + ": " + std::strerror(errno);
    return {};
  }
  for (const char* const name : {"server.lock", "server.log", "server.host"}) {
    if (!client::CanBeRegularFile(folder / name, why)) {
      *why = (folder / name).string() + ": " + *why;
      return {};
    }
  }
  const StartLock lock(folder / "server.lock");
  if (!lock.held()) {
    *why = (folder / "server.lock").string() + ": cannot be locked";
    return {};
  }
  if (PrivateServer server = FindPrivateServer(); !server.grpc.empty()) return server;
  if (OfAnotherHost(folder)) {
    folder = folder / "hosts" / HostName();
    fs::create_directories(folder, error);
  }
  return Start(folder, why);
}

std::string PrivateGrpcOf(const std::string& page) {
  const PrivateServer server = FindPrivateServer();
  const std::string host_port =
      server.page.substr(server.page.find("//") == std::string::npos ? 0 : server.page.find("//") + 2);
  return !server.grpc.empty() && host_port == page ? server.grpc : "";
}

std::string EarlierRuns(const std::string& command) {
  for (const fs::path& place : Places()) {
    if (!HasData(place / "data")) continue;
    return "the runs of your training scripts are in " + (place / "data").string() + ": `" + command +
           "` shows them, by a private server over that folder";
  }
  return "";
}

}  // namespace bellwether::cli
