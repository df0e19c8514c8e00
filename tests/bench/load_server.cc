#include "tests/bench/load_server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <regex>
#include <thread>

#include "tests/bench/load_parts.h"

namespace bellwether {
namespace {

[[noreturn]] void Die(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::exit(1);
}

std::string ReadText(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) Die(path.string() + ": cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

std::vector<int> ParseCpus(const std::string& text) {
  std::vector<int> cpus;
  const std::regex part("(\\d+)(?:-(\\d+))?(?:,|$)");
  size_t used = 0;
  for (std::sregex_iterator it(text.begin(), text.end(), part), end; it != end; ++it) {
    if (static_cast<size_t>(it->position()) != used) break;
    used += static_cast<size_t>(it->length());
    const int low = std::stoi((*it)[1]), high = (*it)[2].matched ? std::stoi((*it)[2]) : low;
    for (int cpu = low; cpu <= high && cpu < CPU_SETSIZE; ++cpu) cpus.push_back(cpu);
  }
  if (used != text.size()) Die("\"" + text + "\" is no list of processors such as 0,2-4");
  return cpus;
}

void PinToCpus(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  if (sched_setaffinity(0, sizeof(set), &set) != 0) Die("these processors cannot be had");
}

LoadServer::LoadServer(const Options& options) : options_(options), folder_(options.folder) {
  if (folder_.empty()) folder_ = std::filesystem::temp_directory_path();
  static int servers = 0;  // Of this process, which may have several.
  folder_ /= "bellwether-load-" + std::to_string(getpid()) + "-" + std::to_string(servers++);
  std::filesystem::create_directories(folder_);
  if (guarded()) WriteGuards();
  std::ofstream(folder_ / "server.yml") << (guarded() ? "tls: {cert_file: tls/server.pem, key_file: tls/server.key, "
                                                        "client_ca_file: tls/ca.pem, crl_file: tls/crl.pem}\n"
                                                        "access_file: access.yml\n"
                                                      : "")
                                        << (options_.guard == Guard::kTokens ? "tokens_file: tokens\n" : "")
                                        // Trainers here send no heartbeats.
                                        << "ingest: {idle_ms_max: 3600000}\n"
                                        // The storm has 1,000 runs beside those that go on.
                                        << (options_.config.find("limits:") != std::string::npos
                                                ? ""
                                                : "limits: {runs_live_max: 2000}\n")
                                        << options_.config << "\n";
  Start();
}

void LoadServer::WriteGuards() const {
  Tool({"cert", "init", folder_ / "tls", "--host", "localhost"});
  for (const char* tenant : {"quiet", "noisy"}) Tool({"cert", "client", folder_ / "tls", tenant});
  std::ofstream access(folder_ / "access.yml");
  access << "tenants:\n  quiet: {streams_max: 4096}\n";
  if (options_.noisy_frames_per_second > 0) {
    access << "  noisy: {frames_per_second_max: " << options_.noisy_frames_per_second << "}\n";
  } else {
    access << "  noisy: {streams_max: 4096}\n";
  }
  access << "identities:\n";
  for (const char* tenant : {"quiet", "noisy"}) {
    access << "- {name: " << tenant << ", tenant: " << tenant << ", certificates: [\"spiffe://bellwether/client/"
           << tenant << "\"], roles: [read, write], runs: [\"*\"]}\n";
  }
  access.close();
  std::filesystem::permissions(folder_ / "access.yml", std::filesystem::perms(0600));
  if (options_.guard != Guard::kTokens) return;
  for (const char* tenant : {"quiet", "noisy"}) {
    Tool(
        {"token", "create", tenant, "--file", folder_ / "tokens", "--out", folder_ / (std::string(tenant) + ".token")});
  }
}

void LoadServer::Tool(const std::vector<std::string>& words) const {
  const std::string tool = (std::filesystem::path(options_.binary).parent_path() / "bellwether").string();
  const pid_t pid = fork();
  if (pid == 0) {
    std::vector<char*> arguments = {const_cast<char*>(tool.c_str())};
    for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    dup2(STDERR_FILENO, STDOUT_FILENO);  // The figures alone go to stdout.
    execv(tool.c_str(), arguments.data());
    _exit(127);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  if (status != 0) Die(tool + " " + words[0] + " failed");
}

void LoadServer::Start() {
  const std::string ready = folder_ / "ready.json";
  std::filesystem::remove(ready);
  const std::string listen =
      "--grpc.listen-address=" +
      (options_.guard == Guard::kUnixSocket ? "unix:" + (folder_ / "grpc.sock").string() : "127.0.0.1:0");
  pid_ = fork();
  if (pid_ == 0) {
    PinToCpus(options_.cpus);
    execl(options_.binary.c_str(), options_.binary.c_str(), ("--storage.path=" + data().string()).c_str(),
          ("--config.file=" + (folder_ / "server.yml").string()).c_str(), listen.c_str(),
          "--web.listen-address=127.0.0.1:0", ("--ready.file=" + ready).c_str(), "--log.level=error", nullptr);
    _exit(127);
  }
  while (!std::filesystem::exists(ready)) {
    if (waitpid(pid_, nullptr, WNOHANG) != 0) Die(options_.binary + " did not start");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const std::string text = ReadText(ready);
  std::smatch found;
  if (!std::regex_search(text, found, std::regex("\"grpc\": ?\"([^\"]*)\""))) Die(ready + " names no address");
  address_ = found[1];
  if (std::regex_search(text, found, std::regex("\"http\": ?\"http://([^\"/]*)"))) http_ = found[1];
}

double LoadServer::KillAndRestart() {
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  const double begin = BenchNow();
  Start();
  return BenchNow() - begin;
}

std::string LoadServer::HttpGet(const std::string& path) const {
  const int file = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(std::stoi(http_.substr(http_.rfind(':') + 1))));
  const std::string request = "GET " + path + " HTTP/1.1\r\nHost: " + http_ + "\r\nConnection: close\r\n\r\n";
  std::string answer;
  if (file >= 0 && connect(file, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
      write(file, request.data(), request.size()) == static_cast<ssize_t>(request.size())) {
    char part[1 << 16];
    for (ssize_t count = 0; (count = read(file, part, sizeof(part))) > 0;) {
      answer.append(part, static_cast<size_t>(count));
    }
  }
  if (file >= 0) close(file);
  const size_t body = answer.find("\r\n\r\n");
  if (body == std::string::npos || answer.find(" 200 ") > 16) Die(path + ": no answer: " + answer.substr(0, 200));
  return answer.substr(body + 4);
}

LoadServer::~LoadServer() {
  if (pid_ != 0) kill(pid_, SIGKILL);
  if (pid_ != 0) waitpid(pid_, nullptr, 0);
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

std::shared_ptr<grpc::ChannelCredentials> LoadServer::CredentialsOf(const std::string& tenant) const {
  if (!guarded()) return grpc::InsecureChannelCredentials();
  const auto certificate =
      grpc::SslCredentials({ReadText(folder_ / "tls/ca.pem"), ReadText(folder_ / ("tls/" + tenant + ".key")),
                            ReadText(folder_ / ("tls/" + tenant + ".pem"))});
  if (options_.guard != Guard::kTokens) return certificate;
  std::string token = ReadText(folder_ / (tenant + ".token"));
  token.erase(token.find_last_not_of("\r\n ") + 1);
  return grpc::CompositeChannelCredentials(certificate, grpc::AccessTokenCredentials(token));
}

std::shared_ptr<grpc::Channel> LoadServer::Connect(const std::string& tenant) const {
  std::shared_ptr<grpc::ChannelCredentials>& credentials = credentials_[tenant];
  if (credentials == nullptr) credentials = CredentialsOf(tenant);
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(address_, credentials, arguments);
}

double LoadServer::CpuSeconds() const { return CpuSecondsOf(pid_); }

double LoadServer::ProcNumber(const std::string& file, const std::string& field) const {
  std::ifstream lines("/proc/" + std::to_string(pid_) + "/" + file);
  for (std::string word; lines >> word;) {
    double number = 0;
    if (word == field && lines >> number) return number;
  }
  return 0;
}

double LoadServer::ResidentMib() const { return ProcNumber("status", "VmRSS:") / 1024; }
double LoadServer::ResidentMaxMib() const { return ProcNumber("status", "VmHWM:") / 1024; }
double LoadServer::WrittenMib() const { return ProcNumber("io", "write_bytes:") / (1 << 20); }

double LoadServer::DataMib() const {
  double bytes = 0;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(data(), ignored)) {
    if (entry.is_regular_file(ignored)) bytes += static_cast<double>(entry.file_size(ignored));
  }
  return bytes / (1 << 20);
}

}  // namespace bellwether
