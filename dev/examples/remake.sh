#!/usr/bin/env bash
# Renews dev/examples/*.patch when the tree has moved: applies each to HEAD, one on top of the other, by a three-way
# merge and writes it back with the lines before its diff. Where that conflicts it stops and says where the conflict is.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD tree=build/examples/remake
git worktree remove --force $tree 2> /dev/null || true
git worktree add -q --detach $tree HEAD
trap 'cd "$root" && git worktree remove --force $tree' EXIT
for patch in dev/examples/*.patch; do
    before=$(git -C $tree write-tree)
    if ! git -C $tree apply --recount --3way --index "$root/$patch"; then
        trap - EXIT
        echo "$patch: conflicts are in $tree; mend them there, then the new patch is what this prints:" \
            "(cd $tree && git add -A && git diff --cached $before)" >&2
        exit 1
    fi
    { grep '^#' "$patch" || true; git -C $tree diff "$before" "$(git -C $tree write-tree)"; } > "$patch.new"
    mv "$patch.new" "$patch"
    echo "$patch: renewed"
done
