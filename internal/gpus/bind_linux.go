package gpus

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// Bind keeps all threads of this process on those of the CPUs on which it may run now, and reports
// whether that has changed anything. If it may run on none of them, nothing changes.
//
// The kernel keeps CPUs by thread. A thread begins with those of the thread that makes it, so once
// all threads of one look have the new set, all later ones do; until then Bind looks again. Memory
// needs no call: by default the kernel takes a page from the node of the CPU that first touches it,
// and from another one if that is full, which is what is wanted of a thread on that node. A policy
// set from outside (numactl) stays. Go sees the fewer CPUs within a second, and sets GOMAXPROCS by them
// unless that was set from outside.
func Bind(cpus []int) (changed bool, err error) {
	var now, set unix.CPUSet
	if err := unix.SchedGetaffinity(os.Getpid(), &now); err != nil {
		return false, fmt.Errorf("ask for the CPUs of this process: %w", err)
	}
	for _, n := range cpus {
		if now.IsSet(n) {
			set.Set(n)
		}
	}
	if set.Count() == 0 || set == now {
		return false, nil
	}
	if err := bindThreads(&set); err != nil {
		return false, err
	}
	return true, nil
}

// looks bounds how often bindThreads looks for new threads. Two are enough unless many are made at
// the moment.
const looks = 100

func bindThreads(set *unix.CPUSet) error {
	for range looks {
		fresh, err := bindOnce(set)
		if err != nil || !fresh {
			return err
		}
	}
	return errors.New("bind to CPUs: there are always new threads")
}

// bindOnce binds the threads that there are, and reports whether one was not bound before.
func bindOnce(set *unix.CPUSet) (fresh bool, err error) {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return false, fmt.Errorf("list threads: %w", err)
	}
	for _, t := range tasks {
		tid, err := strconv.Atoi(t.Name())
		if err != nil {
			continue
		}
		var has unix.CPUSet
		if err = unix.SchedGetaffinity(tid, &has); err == nil && has != *set {
			fresh = true
			err = unix.SchedSetaffinity(tid, set)
		}
		if err != nil && !errors.Is(err, unix.ESRCH) { // it has ended
			return false, fmt.Errorf("bind thread %d to CPUs: %w", tid, err)
		}
	}
	return fresh, nil
}
