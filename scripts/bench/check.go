package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/xpyd/xpyd/internal/figures"
)

// check reports figures whose command, flag, test, stage or make target does not exist, or whose
// commit is not in the history. It runs nothing.
func check(root string, all []figures.Figure) error {
	var errs []error
	commands, commits := map[string]error{}, map[string]error{}
	for _, f := range all {
		if _, known := commands[f.Command]; !known {
			commands[f.Command] = checkCommand(root, f.Command)
		}
		if _, known := commits[f.Commit]; !known {
			commits[f.Commit] = checkCommit(root, f.Commit)
		}
		if err := errors.Join(commands[f.Command], commits[f.Commit]); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", f.Name, err))
		}
	}
	return errors.Join(errs...)
}

// checkCommit looks for a commit in the history. It passes if the history is not complete.
func checkCommit(root, commit string) error {
	shallow, err := exec.Command("git", "-C", root, "rev-parse", "--is-shallow-repository").Output()
	if err != nil || strings.TrimSpace(string(shallow)) != "false" {
		return nil
	}
	if err := exec.Command("git", "-C", root, "cat-file", "-e", commit+"^{commit}").Run(); err != nil {
		return fmt.Errorf("commit %s is not in the history", commit)
	}
	return nil
}

// checkCommand looks for everything that a command line names.
func checkCommand(root, line string) error {
	words := strings.Fields(line)
	for len(words) > 0 && strings.Contains(words[0], "=") {
		name, _, _ := strings.Cut(words[0], "=")
		if !mentioned(root, name) {
			return fmt.Errorf("%q: nothing reads %s", line, name)
		}
		words = words[1:]
	}
	if len(words) == 0 {
		return fmt.Errorf("%q is no command", line)
	}
	program, args := words[0], words[1:]
	if program == "go" && len(args) > 1 && args[0] == "run" {
		program, args = strings.TrimPrefix(args[1], "./"), args[2:]
	}
	glob, format := "", "" // the source that names each argument, and a pattern for that
	switch {
	case program == "scripts/bench" && len(args) == 0:
		return fmt.Errorf("%q names no benchmark", line)
	case program == "scripts/bench":
		c, err := find(args[0])
		if err == nil {
			_, _, err = c.parse(args[1:])
		}
		if err != nil {
			return fmt.Errorf("%q: %w", line, err)
		}
		return nil
	case program == "make" && len(args) == 1:
		glob, format = "Makefile", `(?m)^%s:`
	case program == "cuda.test" && len(args) == 2 && args[0] == "-test.run":
		glob, format, args = "kernels/cuda/*_test.go", `(?m)^func Test\w*%s`, []string{strings.TrimPrefix(args[1], "Test")}
	case program == "probe" || program == "moves":
		glob, format = "kernels/cuda/probe/"+program+".cu", `"%s"`
		args = slices.DeleteFunc(args, func(a string) bool { return strings.Trim(a, "0123456789") == "" })
	case program == "scripts/cuda-test":
		glob, format = "scripts/cudatest/stages.go", `name: "%s", about:`
	case strings.HasPrefix(program, "scripts/"):
		info, err := os.Stat(filepath.Join(root, program))
		if err != nil {
			return fmt.Errorf("%q: there is no %s", line, program)
		}
		if glob, format = program, `["'-]%s\b`; info.IsDir() {
			glob += "/*.go"
		}
		args = slices.DeleteFunc(args, func(a string) bool { return !strings.HasPrefix(a, "-") })
	default:
		return fmt.Errorf("%q: there is no program %s", line, program)
	}
	for _, a := range args {
		pattern := fmt.Sprintf(format, regexp.QuoteMeta(strings.TrimLeft(a, "-")))
		if !matches(root, glob, pattern) {
			return fmt.Errorf("%q: there is no %s in %s", line, pattern, glob)
		}
	}
	return nil
}

// matches reports whether any file of a glob matches pattern.
func matches(root, glob, pattern string) bool {
	paths, _ := filepath.Glob(filepath.Join(root, glob))
	return slices.ContainsFunc(paths, func(path string) bool {
		text, err := os.ReadFile(path)
		return err == nil && regexp.MustCompile(pattern).Match(text)
	})
}

// mentioned reports whether a source under root contains text.
func mentioned(root, text string) (found bool) {
	_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || found {
			return fs.SkipAll
		}
		if d.IsDir() && slices.Contains([]string{".git", "bench", ".cache", "bin"}, d.Name()) {
			return fs.SkipDir
		}
		raw, err := os.ReadFile(path)
		found = err == nil && strings.Contains(string(raw), text)
		return nil
	})
	return found
}
