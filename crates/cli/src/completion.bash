# Bash splits words at the characters of COMP_WORDBREAKS, among them ":" and "=", and replaces only the text
# behind the last of them ($2). So this joins the split words, requests completions of the whole word, and
# removes from each the text that bash keeps.
_blockyard() {
    local program=$1 line=${COMP_LINE:0:COMP_POINT} part gap kept answers answer is_quoted=
    local -a words=()
    COMPREPLY=()
    for part in "${COMP_WORDS[@]:0:COMP_CWORD+1}"; do
        gap=${line%%[![:space:]]*}
        line=${line:${#gap}}
        part=${part:0:${#line}}
        line=${line:${#part}}
        if [[ $gap || ${#words[@]} -eq 0 ]]; then
            words+=("$part")
        else
            words[${#words[@]}-1]+=$part
        fi
    done
    [[ ${words[${#words[@]}-1]} == *[\"\']* ]] && is_quoted=yes
    words=("${words[@]//[\"\'\\]/}")
    kept=${words[${#words[@]}-1]}
    kept=${kept%"${2//[\"\'\\]/}"}
    # The program as typed. An alias is no program.
    [[ $program == "~/"* ]] && program=$HOME/${program:2}
    type -P -- "$program" > /dev/null || program=blockyard
    answers=$(COMPLETE=bash _CLAP_IFS=$'\v' _CLAP_COMPLETE_INDEX=$((${#words[@]} - 1)) \
        "$program" -- "${words[@]}" 2> /dev/null) || return 0
    [[ $answers ]] || return 0
    while IFS= read -r -d $'\v' answer; do
        answer=${answer#"$kept"}
        [[ $is_quoted ]] || answer=${answer// /\\ }
        COMPREPLY+=("$answer")
    done <<< "$answers"$'\v'
    # Bash before 4 has no compopt and never appends a space here.
    if [[ ! ${COMPREPLY[0]} =~ [=/:]$ ]]; then
        compopt +o nospace 2> /dev/null
    fi
    return 0
}
if [[ ${BASH_VERSINFO[0]} -gt 4 || ${BASH_VERSINFO[0]} -eq 4 && ${BASH_VERSINFO[1]} -ge 4 ]]; then
    complete -o nospace -o bashdefault -o nosort -F _blockyard blockyard
else
    complete -o nospace -o bashdefault -F _blockyard blockyard
fi
