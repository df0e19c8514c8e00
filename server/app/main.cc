// bellwetherd: flags, signals, and one Server.

#include <malloc.h>
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/access/secret_file.h"
#include "server/access/token_file.h"
#include "server/app/config.h"
#include "server/app/named_files.h"
#include "server/app/server.h"
#include "server/app/version.h"
#include "server/commands/access_commands.h"
#include "server/commands/command_result.h"
#include "server/commands/policy_commands.h"
#include "server/commands/rules_commands.h"
#include "server/commands/storage_commands.h"
#include "server/offline/replay.h"
#include "server/util/log.h"
#include "server/util/own_file.h"
#include "server/util/systemd_notify.h"

namespace bellwether::server {
namespace {

constexpr int kOk = 0;
constexpr int kFailed = 1;
constexpr int kUsage = 2;
constexpr int kFindings = 3;

std::string DefaultStorage() {
  const char* service = std::getenv("STATE_DIRECTORY");  // Of a systemd service; several are parted by colons.
  if (service != nullptr && service[0] == '/') return std::string(service, std::strcspn(service, ":"));
  const char* state = std::getenv("XDG_STATE_HOME");
  if (state != nullptr && state[0] == '/') return std::string(state) + "/bellwether/server";
  const char* home = std::getenv("HOME");
  return std::string(home != nullptr ? home : "/var/lib") + "/.local/state/bellwether/server";
}

// Appears whole or not at all.
bool WriteReadyFile(const std::string& path, const Server& server, const std::string& token, OwnFile* written) {
  std::string page = server.page_url();
  page = page.substr(0, page.find_last_not_of('/', page.find('?') - 1) + 1);
  const nlohmann::json ready = {
      {"pid", getpid()}, {"grpc", server.grpc_address()}, {"http", page.substr(0, page.find('?'))}, {"token", token}};
  const std::string partial = path + ".partial";
  {
    std::ofstream file(partial);
    std::filesystem::permissions(partial, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
    file << ready.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
    if (!file.flush()) return false;
  }
  return written->Take(partial) && written->Rename(path);
}

struct Flags {
  std::string config_file;
  bool config_check = false;
  std::string log_level = "info", log_format = "logfmt";
  std::string ready_file;
  std::string token_file;
  std::string idle_exit;
  ReplayOptions replay;
  std::vector<std::string> recordings;  // Of replay.
  BankOptions bank;                     // Of replay.
};

// "300s", "5m", "1h", or plain seconds; -1 = none of these.
int64_t ParseSeconds(const std::string& text) {
  size_t used = 0;
  long long value = -1;
  try {
    value = std::stoll(text, &used);
  } catch (const std::exception&) {
    return -1;
  }
  const std::string unit = text.substr(used);
  const int64_t scale = unit.empty() || unit == "s" ? 1 : unit == "m" ? 60 : unit == "h" ? 3600 : -1;
  return value < 0 || scale < 0 ? -1 : value * scale;
}

// Without its token, which is for the ready file and its owner alone.
std::string ShownPage(const Server& server) {
  const std::string& url = server.page_url();
  if (url.empty()) return "off";
  const size_t token = url.find("?token=");
  return token == std::string::npos ? url
                                    : url.substr(0, token) + " (with the token of --ready.file or --web.token-file)";
}

int Serve(ServerOptions options, const Flags& flags) {
  // Blocked before any thread starts, taken by sigtimedwait below.
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&signals, signal);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  auto server = Server::Start(options);
  if (!server.ok()) {
    LogError("{}", std::string(server.status().message()));
    return kFailed;
  }
  LogInfo("bellwetherd {} ({}): ready, gRPC on {}, page {}", kVersion, kRevision, (*server)->grpc_address(),
          ShownPage(**server));
  OwnFile ready_file;
  if (!flags.ready_file.empty() && !WriteReadyFile(flags.ready_file, **server, options.web_token, &ready_file)) {
    LogError("--ready.file={}: cannot be written", flags.ready_file);
    return kFailed;
  }
  (void)NotifySystemd("READY=1");
  bool failed = false;
  for (;;) {
    const timespec second{1, 0};
    const int signal = sigtimedwait(&signals, nullptr, &second);
    if (signal == SIGTERM || signal == SIGINT) break;
    if (signal == SIGHUP) {
      (void)NotifySystemd(ReloadingState());
      (void)(*server)->Reload();  // It says what came of it; what was in force stays so when a file is bad.
      (void)NotifySystemd("READY=1");
    }
    const auto busy = (*server)->Tick();
    if (!busy.ok()) {
      failed = true;
      LogError("ending: {}", std::string(busy.status().message()));
      break;
    }
    if (!*busy) {
      LogInfo("nobody was attached for {}: ending", flags.idle_exit);
      break;
    }
  }
  (void)NotifySystemd("STOPPING=1");
  (void)ready_file.Remove();  // Not that of a server that was told the same file since.
  // A hung part must not keep the process: what is durable is durable.
  alarm(15);
  const absl::Status stopped = (*server)->Stop();
  if (!stopped.ok()) {
    LogError("stopped, but: {}", std::string(stopped.message()));
    return kFailed;
  }
  LogInfo("stopped; everything acknowledged is durable");
  return failed ? kFailed : kOk;
}

// A library's path: beside this program, as in a build and a bundle, or else, whether it exists or not, where
// it is installed.
std::string LibraryPath(const std::string& file) {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return file;
  const auto folder = self.parent_path();
  if (std::filesystem::exists(folder / file, error)) return (folder / file).string();
  return (folder / kProgramsToLibraries / file).lexically_normal().string();
}

int ReplayFiles(const Flags& flags) {
  ReplayOptions options = flags.replay;
  auto bank = OpenBank(flags.bank, [](const std::string& why) {
    std::fprintf(stderr, "the GPU is given up, the CPU goes on: %s\n", why.c_str());
  });
  if (!bank.ok()) {
    std::fprintf(stderr, "%s\n", std::string(bank.status().message()).c_str());
    return kFailed;
  }
  options.bank = bank->get();
  const std::vector<std::string> files = RecordingsAt(flags.recordings);
  options.headed = files.size() > 1;
  const int code = ForEachFile(files, "could not be judged", [&options](const std::string& file) {
    options.file = file;
    return Replay(options);
  });
  return code == kCommandOk ? kOk : kFailed;
}

absl::Status ReadWebToken(const std::string& file, std::string* token) {
  const auto text = ReadGuardedFile(file, Secrecy::kSecret);
  if (text.ok()) std::istringstream(*text) >> *token;
  if (!token->empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--web.token-file=", file, ": ", text.ok() ? "is empty" : text.status().message()));
}

int Main(int argc, char** argv) {
  ServerOptions options;
  Flags flags;
  options.engine.storage_path = DefaultStorage();
  CLI::App app(
      "Watches the numerics of attention in training runs, names the head that will destroy a run, and says so\n"
      "in time.  With no flags it serves on loopback and keeps its data under the user's state directory.");
  app.footer(
      "Examples:\n  bellwetherd --storage.path=/var/lib/bellwether\n"
      "  bellwetherd --config.file=bellwetherd.yml --config.check\n  bellwetherd replay run.bwrun --json\n"
      "  bellwetherd rules check rules.yml");
  app.add_option("--config.file", flags.config_file, "YAML; flags win over it");
  app.add_flag(
      "--config.check", flags.config_check,
      "check the configuration and every file that it names, say all findings or how many keys it sets, and exit: "
      "0 good, 3 findings");
  // Flags that win over a key of the file.
  std::deque<std::pair<std::string, std::string*>> given;
  const auto add = [&app, &given](const char* flag, std::string* target, const std::string& help) {
    app.add_option(flag, given.emplace_back("", target).first, help);
  };
  add("--rules.file", &options.rules_file, "thresholds and own rules, YAML; read again on SIGHUP");
  add("--policy.file", &options.policy_file,
      "what may be done about alerts, YAML; read again on SIGHUP; runs can have policies of their own");
  add("--storage.path", &options.engine.storage_path,
      "where log and database live [" + options.engine.storage_path + "]");
  app.add_flag("--storage.repair", options.engine.wal.repair, "cut corrupt ranges out of the log and say what is lost");
  add("--grpc.listen-address", &options.grpc_address, "host:port or unix:/path [" + options.grpc_address + "]");
  add("--web.listen-address", &options.web_address,
      "host:port, port 0 = any free one, or 'none' [" + options.web_address + "]");
  add("--tls.cert-file", &options.tls.certificate,
      "PEM: this server's certificate, and what signed it; read again when it changes");
  add("--tls.key-file", &options.tls.key, "PEM: its key, which no other user may read");
  add("--tls.client-ca-file", &options.tls.client_ca,
      "PEM: the authorities of clients' certificates; gRPC then asks for one");
  add("--tls.crl-file", &options.tls.crl,
      "PEM: which of those have been taken back (`bellwether cert revoke`); read again when it changes");
  add("--access.file", &options.access.access_file,
      "rights of each identity, YAML; read again on SIGHUP and when it changes");
  add("--access.tokens-file", &options.access.tokens_file,
      "hashes of tokens, written by `bellwether token`; read again in the same cases");
  add("--web.external-url", &options.external_url,
      "the page's address in notifications, and where trainers ask for their alerts");
  app.add_option("--web.token-file", flags.token_file, "file with the token that the page asks for");
  app.add_flag("--web.enable-reload", options.reload_by_http,
               "POST /-/reload reads the rules and the policy file again");
  app.add_flag("--insecure-i-understand", options.insecure_i_understand,
               "allow addresses off loopback that anybody may use: plaintext, or without certificates");
  app.add_option(
      "--lifetime.idle-exit", flags.idle_exit,
      "end when no client was attached for so long (300s, 5m); a private server: the page gets a random token");
  app.add_option("--ready.file", flags.ready_file,
                 "written when serving: {pid, grpc, http, token}; removed at the end");
  app.add_option("--log.level", flags.log_level, "debug, info, warn, error")->capture_default_str();
  app.add_option("--log.format", flags.log_format, "logfmt, json")->capture_default_str();
  const auto add_gpu = [](CLI::App* to, BankOptions* bank) {
    to->add_option("--gpu", bank->gpu, "auto, on, off: where the detectors run; on refuses to start without a GPU")
        ->capture_default_str();
    to->add_option("--gpu.library", bank->library,
                   "the detectors' library for GPUs [libbellwether_bank.so, installed with this program]");
    to->add_option("--gpu.cusolver", bank->cusolver,
                   "NVIDIA's cuSOLVER, for spectra [libcusolver.so of a known version]");
  };
  options.bank.library = flags.bank.library = LibraryPath("libbellwether_bank.so");
  add_gpu(&app, &options.bank);
  flags.bank.gpu = "off";  // Opening the device takes longer than judging a run.
  app.set_version_flag("--version", std::string("bellwetherd ") + kVersion + " (" + kRevision + ")");
  CLI::App* const replay = app.add_subcommand("replay", "judge recorded runs offline with the server's own detectors");
  replay->add_option("files", flags.recordings, "the .bwrun, or folders of them")->required();
  replay->add_flag("--json", flags.replay.json, "one JSON object a line per transition");
  replay->add_option("--until-step", flags.replay.until_step, "stop after this step")->check(CLI::NonNegativeNumber);
  add_gpu(replay, &flags.bank);
  AccessCommands access;
  access.AddTo(&app);
  RulesCommands rules;
  rules.AddFlag(replay);
  rules.AddTo(&app);
  PolicyCommands policy;
  rules.AddFlag(policy.AddTo(&app));
  CLI::App* const config = app.add_subcommand("config", "what the configuration file may say");
  config->require_subcommand(1);
  config->add_subcommand("reference", "print docs/reference/configuration.md");
  StorageCommands storage_commands;
  storage_commands.AddTo(&app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kOk : kUsage;
  }
  if (!SetUpLog(flags.log_level, flags.log_format)) {
    std::fprintf(stderr, "--log.level=%s --log.format=%s: levels are debug, info, warn, error; formats logfmt, json\n",
                 flags.log_level.c_str(), flags.log_format.c_str());
    return kUsage;
  }
  if (const auto code = access.Run()) return *code;
  if (const auto code = rules.Run()) return *code;
  if (const auto code = rules.ReadFlag(&flags.replay.judge)) return *code;
  if (const auto code = policy.Run(flags.replay.judge)) return *code;
  if (config->parsed()) {
    std::fputs(ConfigReference().c_str(), stdout);
    return kOk;
  }
  if (replay->parsed()) return ReplayFiles(flags);
  std::string findings;
  const auto check = [&findings](const absl::Status& status) {
    if (!status.ok()) absl::StrAppend(&findings, status.message(), "\n");
  };
  size_t keys = 0;
  if (!flags.config_file.empty()) {
    ServerOptions legible = options;
    const absl::StatusOr<size_t> read = ReadConfig(flags.config_file, &options, &legible);
    if (read.ok()) {
      keys = *read;
    } else {
      check(read.status());
      options = std::move(legible);  // The files that it names are looked at all the same.
    }
  }
  for (auto& [text, target] : given) {
    if (!text.empty()) *target = std::move(text);
  }
  if (options.web_address == "none") options.web_address.clear();
  if (findings.empty()) {
    if (options.tls.certificate.empty() != options.tls.key.empty()) {
      std::fprintf(stderr, "--tls.cert-file and --tls.key-file belong together\n");
      return kUsage;
    }
    if (!options.tls.crl.empty() && options.tls.client_ca.empty()) {
      std::fprintf(stderr, "--tls.crl-file needs --tls.client-ca-file, which signs it\n");
      return kUsage;
    }
    check(CheckGrpcAddress("--grpc.listen-address", options.grpc_address));
    check(CheckWebAddress("--web.listen-address", options.web_address));
    check(CheckPageUrl("--web.external-url", options.external_url));
  }
  check(ReadNamedFiles(std::getenv("BELLWETHER_CLUSTER_DSN"), &options));
  check(CheckClusterBuild(options.cluster));
  if (flags.config_check) {
    check(CheckNamedFiles(options, std::time(nullptr)));
    if (!flags.token_file.empty()) check(ReadWebToken(flags.token_file, &options.web_token));
    if (!flags.idle_exit.empty()) options.web_token = "made at the start";
    if (findings.empty()) check(CheckProtection(options));
  }
  if (!findings.empty()) {
    std::fputs(findings.c_str(), stderr);
    return flags.config_check ? kFindings : kUsage;
  }
  if (flags.config_check) {
    std::printf("good: %zu keys\n", keys);
    return kOk;
  }
  if (const auto code = storage_commands.Run(options.engine)) return *code;
  if (!flags.idle_exit.empty()) {
    options.idle_exit_seconds = ParseSeconds(flags.idle_exit);
    if (options.idle_exit_seconds < 1) {
      std::fprintf(stderr, "--lifetime.idle-exit=%s: must be a time such as 300s, 5m, 1h\n", flags.idle_exit.c_str());
      return kUsage;
    }
    const auto token = NewToken();
    if (!token.ok()) return Report(token.status());
    options.web_token = *token;
  }
  if (!flags.token_file.empty()) {
    if (const absl::Status read = ReadWebToken(flags.token_file, &options.web_token); !read.ok()) {
      std::fprintf(stderr, "%s\n", std::string(read.message()).c_str());
      return kUsage;
    }
  }
  return Serve(std::move(options), flags);
}

}  // namespace
}  // namespace bellwether::server

int main(int argc, char** argv) {
  // States and batches of rows are large and live for moments.  glibc raises the size
  // from which it maps memory of its own with each one that is freed, up to 32 MiB,
  // and then keeps them in heaps, full of holes: at 1,000 runs 0.3 GB more.
  mallopt(M_MMAP_THRESHOLD, 128 << 10);
  mallopt(M_TRIM_THRESHOLD, 1 << 20);
  return bellwether::server::Main(argc, argv);
}
