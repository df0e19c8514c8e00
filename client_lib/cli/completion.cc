// completion bash|zsh|fish: scripts that ask this command what fits.
//
// What fits is decided in one place, candidates.cc, from the command tree
// itself; the scripts only hand over the words and show the answer.
#include <iostream>

#include "cli/cli.h"

namespace bellwether::cli {
namespace {

// Words come from the line, not from COMP_WORDS, which bash also splits at ":"
// and "="; the answer is given from the last of those on, as bash wants it.
constexpr char kBash[] = R"(# bash completion of bellwether; to load it: source <(bellwether completion bash)
_bellwether() {
  local line=${COMP_LINE:0:COMP_POINT} words word help current
  read -ra words <<<"$line"
  [[ $line == *[[:space:]] ]] && words+=('')
  current=${words[-1]}
  local prefix=
  [[ $current == *[:=]* ]] && prefix=${current%"${current##*[:=]}"}
  COMPREPLY=()
  while IFS=$'\t' read -r word help; do
    [ "$word" = :files ] && { COMPREPLY=(); return; }
    COMPREPLY+=("${word#"$prefix"}")
  done < <("${words[0]}" completion candidates "${words[@]:1}" 2>/dev/null)
  [ ${#COMPREPLY[@]} -gt 0 ] || compopt +o default 2>/dev/null
}
complete -o default -F _bellwether bellwether
)";

// Both as an autoloaded function and sourced.
constexpr char kZsh[] = R"(#compdef bellwether
# zsh completion of bellwether; put it as _bellwether into a folder of $fpath
_bellwether() {
  local -a answer values shown
  local line
  answer=("${(@f)$("${(Q)words[1]}" completion candidates "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  [[ $answer[1] == :files ]] && { _files; return }
  for line in $answer; do
    values+=("${line%%$'\t'*}")
    shown+=("${line/$'\t'/  -- }")
  done
  compadd -l -d shown -- $values
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _bellwether "$@"; else compdef _bellwether bellwether; fi
)";

constexpr char kFish[] = R"(# fish completion of bellwether; to load it: bellwether completion fish | source
function __bellwether_candidates
  set -l words (commandline -opc)
  set -l current (commandline -ct)
  set -l answer ($words[1] completion candidates $words[2..-1] "$current" 2>/dev/null)
  if test "$answer[1]" = :files
    __fish_complete_path "$current"
  else
    printf '%s\n' $answer
  end
end
complete -c bellwether -f -a '(__bellwether_candidates)'
)";

template <const char* script>
ExitCode Run(Cli*, const NoOptions&) {
  std::cout << script;
  return kOk;
}

}  // namespace

void AddCompletion(Cli* cli) {
  CLI::App* const noun = AddNoun(cli, "completion", "Scripts that let a shell complete this command");
  CLI::App* command = nullptr;
  AddCommand<NoOptions>(cli, noun, "bash", "For bash: commands, flags, their values, runs, alerts and actions",
                        "source <(bellwether completion bash)", &Run<kBash>, &command);
  AddCommand<NoOptions>(cli, noun, "zsh", "For zsh", "bellwether completion zsh > ~/.zfunc/_bellwether", &Run<kZsh>,
                        &command);
  AddCommand<NoOptions>(cli, noun, "fish", "For fish", "bellwether completion fish | source", &Run<kFish>, &command);
}

}  // namespace bellwether::cli
