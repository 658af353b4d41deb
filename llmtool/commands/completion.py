"""``llmtool completion``: the script that a shell sources."""

import click
from click.shell_completion import get_completion_class

PROGRAM = "llmtool"
VARIABLE = "_LLMTOOL_COMPLETE"  # the environment variable by which a shell asks for completions

# Two of bash's word breaks, ':' and '=', stand inside a layout word. click's own script takes the words that bash
# broke; this one splits the line itself and hands back only what comes after the last break.
BASH = r"""_llmtool_completion() {
    local words current broken response kind value
    read -ra words <<< "${COMP_LINE:0:COMP_POINT}"
    [[ "${COMP_LINE:0:COMP_POINT}" == *" " ]] && words+=("")
    current="${words[-1]}"
    broken="${current%"${current##*[:=]}"}"
    COMPREPLY=()
    while IFS=',' read -r kind value; do
        case "$kind" in
            dir|file) compopt -o default ;;
            plain) [[ "$value" == *= ]] && compopt -o nospace; COMPREPLY+=("${value#"$broken"}") ;;
        esac
    done < <(COMP_WORDS="${words[*]@Q}" COMP_CWORD=$((${#words[@]} - 1)) _LLMTOOL_COMPLETE=bash_complete llmtool)
}
complete -F _llmtool_completion llmtool"""


@click.command(short_help="Print the script that completes llmtool's commands in your shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and layout words.

    \b
    bash:  llmtool completion bash > ~/.local/share/bash-completion/completions/llmtool
    zsh:   llmtool completion zsh > ~/.zfunc/_llmtool     (with fpath+=~/.zfunc before compinit)
    fish:  llmtool completion fish > ~/.config/fish/completions/llmtool.fish
    """
    maker = get_completion_class(shell)
    assert maker is not None
    script = BASH if shell == "bash" else maker(ctx.find_root().command, {}, PROGRAM, VARIABLE).source()
    click.echo(script)
