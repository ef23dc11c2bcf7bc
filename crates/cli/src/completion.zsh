#compdef blockyard
# clap_complete's script adds a space behind each completion, also where its value follows: `ram:`, `irqmode=`.
function _clap_dynamic_completer_blockyard() {
    local _CLAP_COMPLETE_INDEX=$((CURRENT - 1))
    local _CLAP_IFS=$'\n'
    local -a completions dirs begun whole
    local completion marked value mark=$'\1'
    completions=("${(@f)$( \
        _CLAP_IFS="$_CLAP_IFS" \
        _CLAP_COMPLETE_INDEX="$_CLAP_COMPLETE_INDEX" \
        COMPLETE="zsh" \
        blockyard -- "${words[@]}" 2>/dev/null \
    )}")
    for completion in $completions; do
        # A description follows the first colon without a backslash.
        marked="${completion//\\:/$mark}"
        value="${marked%%:*}"
        case $value in
            */)
                marked="${value%/}${marked#$value}"
                dirs+=("${marked//$mark/\\:}")
                ;;
            *[=,$mark]) begun+=("$completion") ;;
            *) whole+=("$completion") ;;
        esac
    done
    [[ -n $dirs ]] && _describe -V 'values' dirs -S '/' -r '/'
    [[ -n $begun ]] && _describe -V 'values' begun -S ''
    [[ -n $whole ]] && _describe -V 'values' whole
}

compdef _clap_dynamic_completer_blockyard blockyard
