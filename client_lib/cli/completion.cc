// completion bash|zsh|fish: scripts made from the command tree itself.
//
// A command is known by its path, "run/list".  The script finds the longest
// path in the words before the cursor and offers what belongs to it: commands,
// flags, and files where a file is due.
#include <functional>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "cli/cli.h"

namespace bellwether::cli {
namespace {

struct Word {
  std::string text, help;
};

struct Node {
  std::string path;  // "" = the root
  std::vector<Word> commands;
  std::vector<Word> flags;
};

std::vector<Word> FlagsOf(const CLI::App* app) {
  std::vector<Word> flags;
  for (const CLI::Option* option : app->get_options()) {
    for (const std::string& name : option->get_snames()) flags.push_back({"-" + name, option->get_description()});
    for (const std::string& name : option->get_lnames()) flags.push_back({"--" + name, option->get_description()});
  }
  return flags;
}

void Collect(const CLI::App* app, const std::string& path, const std::vector<Word>& globals, std::vector<Node>* nodes) {
  Node node{.path = path, .flags = FlagsOf(app)};
  // Global flags are taken anywhere; --help is everybody's own.
  if (!path.empty()) {
    for (const Word& flag : globals) {
      if (flag.text != "--help" && flag.text != "-h") node.flags.push_back(flag);
    }
  }
  const auto commands = app->get_subcommands([](const CLI::App*) { return true; });
  for (const CLI::App* command : commands) node.commands.push_back({command->get_name(), command->get_description()});
  nodes->push_back(node);
  for (const CLI::App* command : commands) {
    Collect(command, path.empty() ? command->get_name() : path + "/" + command->get_name(), globals, nodes);
  }
}

std::string Join(const std::vector<Word>& words) {
  std::string joined;
  for (const Word& word : words) joined += (joined.empty() ? "" : " ") + word.text;
  return joined;
}

// The part that bash and zsh share: sets `path`, then `offer` from it.
void ShellCases(const std::vector<Node>& nodes, const char* words) {
  std::string known;
  for (const Node& node : nodes) known += " " + node.path;
  std::cout << "  local path= word offer=\n"
               "  for word in "
            << words
            << "; do\n"
               "    case \""
            << known
            << " \" in *\" ${path:+$path/}$word \"*) path=${path:+$path/}$word ;; esac\n"
               "  done\n"
               "  case \"$path\" in\n";
  for (const Node& node : nodes) {
    std::vector<Word> words_of = node.commands;
    words_of.insert(words_of.end(), node.flags.begin(), node.flags.end());
    std::cout << "    \"" << node.path << "\") offer=\"" << Join(words_of) << "\" ;;\n";
  }
  std::cout << "  esac\n";
}

ExitCode Bash(const std::vector<Node>& nodes) {
  std::cout << "# bash completion of bellwether; to load it: source <(bellwether completion bash)\n"
               "_bellwether() {\n"
               "  local current=${COMP_WORDS[COMP_CWORD]}\n";
  ShellCases(nodes, "\"${COMP_WORDS[@]:1:COMP_CWORD-1}\"");
  std::cout << "  COMPREPLY=($(compgen -W \"$offer\" -- \"$current\"))\n"
               "}\n"
               "complete -o default -F _bellwether bellwether\n";
  return kOk;
}

ExitCode Zsh(const std::vector<Node>& nodes) {
  // `path` and `words` are special in zsh: emulate keeps them local.
  std::cout << "#compdef bellwether\n"
               "# zsh completion of bellwether; put it as _bellwether into a folder of $fpath\n"
               "_bellwether() {\n"
               "  local -h path\n"
               "  local -a before=(\"${(@)words[2,CURRENT-1]}\")\n";
  ShellCases(nodes, "$before");
  std::cout << "  compadd -- ${=offer} || _files\n"
               "}\n"
               "if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _bellwether \"$@\"; else compdef _bellwether "
               "bellwether; fi\n";
  return kOk;
}

std::string FishQuote(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) {
    if (c == '\'' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + "'";
}

ExitCode Fish(const std::vector<Node>& nodes) {
  std::string known;
  for (const Node& node : nodes) {
    if (!node.path.empty()) known += " " + node.path;
  }
  std::cout << "# fish completion of bellwether; to load it: bellwether completion fish | source\n"
               "function __bellwether_at\n"
               "  set -l at ''\n"
               "  for word in (commandline -opc)[2..-1]\n"
               "    set -l next (string join / $at $word | string trim -l -c /)\n"
               "    contains -- $next"
            << known
            << "; and set at $next\n"
               "  end\n"
               "  test \"$at\" = \"$argv[1]\"\n"
               "end\n";
  for (const Node& node : nodes) {
    const std::string when = "complete -c bellwether -n " + FishQuote("__bellwether_at " + FishQuote(node.path));
    for (const Word& command : node.commands) {
      std::cout << when << " -f -a " << FishQuote(command.text) << " -d " << FishQuote(command.help) << '\n';
    }
    for (const Word& flag : node.flags) {
      const bool is_long = flag.text.rfind("--", 0) == 0;
      std::cout << when << (is_long ? " -l " : " -s ") << flag.text.substr(is_long ? 2 : 1) << " -d "
                << FishQuote(flag.help) << '\n';
    }
  }
  return kOk;
}

struct NoOptions {};

template <ExitCode (*print)(const std::vector<Node>&)>
ExitCode Run(Cli* cli, const NoOptions&) {
  std::vector<Node> nodes;
  Collect(&cli->app, "", FlagsOf(&cli->app), &nodes);
  return print(nodes);
}

}  // namespace

void AddCompletion(Cli* cli) {
  CLI::App* const noun = AddNoun(cli, "completion", "Scripts that let a shell complete this command");
  CLI::App* command = nullptr;
  AddCommand<NoOptions>(cli, noun, "bash", "For bash", "source <(bellwether completion bash)", &Run<&Bash>, &command);
  AddCommand<NoOptions>(cli, noun, "zsh", "For zsh", "bellwether completion zsh > ~/.zfunc/_bellwether", &Run<&Zsh>,
                        &command);
  AddCommand<NoOptions>(cli, noun, "fish", "For fish", "bellwether completion fish | source", &Run<&Fish>, &command);
}

}  // namespace bellwether::cli
